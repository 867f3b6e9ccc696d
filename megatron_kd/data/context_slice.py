"""The positions of a row that one context-parallel rank works on. s positions in a row, c ranks.

Under causal attention late positions cost more than early ones. Megatron-Core therefore cuts a row into 2c chunks of
equal length and gives rank r the chunks r and 2c − 1 − r, in this order (its ``get_batch_on_this_cp_rank``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.data.documents import restarted_positions
from megatron_kd.errors import ConfigError


@dataclass(frozen=True)
class ContextSlice:
    """One rank's part of every row.

    Attributes:
        rank: from 0, within the context-parallel group.
        size: ranks of that group; 1 is the whole row, of whatever length.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a rank outside its group."""
        if not 0 <= self.rank < self.size:
            raise ValueError(f"context-parallel rank {self.rank} is outside 0 … {self.size - 1}")

    def length(self, seq_length: int) -> int:
        """s/c, the positions of this rank. Raises ConfigError where the row is not a multiple of 2c."""
        if self.size > 1 and seq_length % (2 * self.size):
            raise ConfigError(
                f"data.seq_length {seq_length} is not a multiple of 2 × parallelism.context_parallel_size {self.size} "
                f"= {2 * self.size}: change one of them"
            )
        return seq_length // self.size

    def ranges(self, seq_length: int) -> tuple[range, ...]:
        """This rank's positions as ascending runs: one or two. Chunks that touch, as the last rank's do, are one run.

        Raises:
            ConfigError: as ``length``.
        """
        chunk = self.length(seq_length) // 2
        last = 2 * self.size - 1 - self.rank
        if last == self.rank + 1:
            return (range(self.rank * chunk, seq_length - self.rank * chunk),)
        return range(self.rank * chunk, (self.rank + 1) * chunk), range(last * chunk, (last + 1) * chunk)

    def positions(self, seq_length: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 [s/c], the places in the row, made on the device. Raises ConfigError as ``length``."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.ranges(seq_length)]
        return torch.cat(runs) if len(runs) > 1 else runs[0]

    def places(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """int64 [b, s/c], the place of each of this rank's tokens in its row, or in its document where there are some.

        Args:
            tokens: [b, s/c].
            documents: integers [b, s], see ``restarted_positions``.
        """
        positions = self.positions(tokens.shape[1] * self.size, tokens.device)
        if documents is None:
            return positions.expand_as(tokens)
        return restarted_positions(documents)[:, positions]


WHOLE = ContextSlice()
