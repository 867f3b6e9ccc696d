"""Do these rows belong to these tokens? A teacher's likely next tokens hold the real next token more often than that
of another row. A row in the wrong place, shifted by one position, or decoded with wrong ids shows no such difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_kd.cache.row import Row
from megatron_kd.errors import CacheError

_ROW_POSITIONS = 64
_TOTAL_POSITIONS = 100
_DEVIATIONS = 4.0


@dataclass
class Evidence:
    """A sign test over the trained positions at which a row and another one have different next tokens.

    ``own`` counts positions whose top K hold the row's next token and not the other's, ``other`` the reverse. For rows
    of other tokens the two are equal but for chance. A row of at least 64 positions with no majority is refused (one
    wrong row in two shows none), and so is a total of at least 100 positions in which the majority is less than four
    standard deviations, √(own + other), of such chance.
    """

    positions: int = 0
    own: int = 0
    other: int = 0

    def add(self, row: Row, other_tokens: np.ndarray, where: str) -> None:
        """Counts a row against the tokens int [L] of another. Raises CacheError for a row without a majority."""
        counted = (row.loss_mask[:-1] > 0) & (row.tokens[1:] != other_tokens[1:])
        candidates = row.ids[:-1][counted]
        own = (candidates == row.tokens[1:][counted, None]).any(-1)
        other = (candidates == other_tokens[1:][counted, None]).any(-1)
        found = Evidence(len(candidates), int((own & ~other).sum()), int((other & ~own).sum()))
        if found.positions >= _ROW_POSITIONS and found.own <= found.other:
            raise CacheError(f"{where}: these targets do not belong to sample {row.sample_id}: {found.reason}")
        self.positions += found.positions
        self.own += found.own
        self.other += found.other

    def require(self, where: str) -> None:
        """Raises CacheError where the rows counted so far are enough to tell that they belong to other tokens."""
        deviation = max(self.own + self.other, 1) ** 0.5
        if self.positions >= _TOTAL_POSITIONS and self.own - self.other < _DEVIATIONS * deviation:
            raise CacheError(f"{where}: the targets up to here do not belong to the samples: {self.reason}")

    @property
    def reason(self) -> str:
        """The figures in words."""
        return (
            f"of {self.positions} positions {self.own} have the real next token among the candidates and not that of "
            f"another row, {self.other} the reverse. Rows are in another order, shifted, or of another tokenizer"
        )

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {"positions": self.positions, "own_next_token_only": self.own, "other_next_token_only": self.other}
