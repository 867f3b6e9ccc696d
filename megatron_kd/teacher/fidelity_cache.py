"""A real cache's rows against the dense teacher: the end-to-end check of capture, storage and reading.

c positions, K kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.cache.inspect import inspect
from megatron_kd.losses.divergences import LOG_P_FLOOR
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.fidelity_rows import DenseRows


@dataclass(frozen=True)
class RowFidelity:
    """The worst place of a cached row, against the dense teacher.

    Attributes:
        error: nats, the largest of the three below.
        logprob_error: largest |stored log-probability − dense one of that id| beyond half a unit in the last place of
            the stored type.
        rank_error: largest difference between the dense log-probabilities of the stored id and of the id that belongs
            in its place; 0 but for ties where the ids are those of the teacher.
        tail_error: largest difference of the log tail masses, both not below −100.
        ids_moved: ids that are not in the place where the teacher now has them, at all positions.
        position: where ``error`` is.
        problem: why the row cannot be read; the rest is then 0.
    """

    sample: int
    error: float = 0.0
    position: int = 0
    logprob_error: float = 0.0
    rank_error: float = 0.0
    tail_error: float = 0.0
    ids_moved: int = 0
    problem: str | None = None

    @classmethod
    def of(
        cls, sample: int, first: int, dense: DenseRows, best: Tensor, targets: TopKTargets, rounding: float
    ) -> RowFidelity:
        """c positions of a row from position ``first`` on.

        Args:
            best: the ids that the teacher's top K has now, [c, at least K].
            rounding: half a unit in the last place of the stored values, relative.
        """
        ids, used = targets.ids, targets.ids >= 0
        best = best[:, : ids.shape[1]]
        rows, right = dense.keep(ids), dense.keep(best)
        log_r, log_p, log_best, tail, log_outside = (
            values.double().clamp(min=LOG_P_FLOOR)
            for values in (targets.logprobs, rows.log_p, right.log_p, targets.tail_logmass, rows.outside.p.log())
        )
        value = torch.where(used, (log_r - log_p).abs() - rounding * log_p.abs(), 0.0).clamp(min=0.0).amax(dim=1)
        rank = torch.where(used, (log_best - log_p).abs(), 0.0).amax(dim=1)
        errors = torch.stack([value, rank, (tail - log_outside).abs()])
        errors = errors.nan_to_num(nan=-LOG_P_FLOOR)  # a damaged value may be anything
        worst = errors.amax(dim=0)
        where = int(worst.argmax())
        return cls(
            sample=sample,
            error=float(worst[where]),
            position=first + where,
            logprob_error=float(errors[0].max()),
            rank_error=float(errors[1].max()),
            tail_error=float(errors[2].max()),
            ids_moved=int(((ids != best) & used).sum()),
        )


def worst_of(parts: Sequence[RowFidelity]) -> RowFidelity:
    """The parts of one row as one."""
    worst = max(parts, key=lambda part: part.error)
    return RowFidelity(
        sample=worst.sample,
        error=worst.error,
        position=worst.position,
        logprob_error=max(part.logprob_error for part in parts),
        rank_error=max(part.rank_error for part in parts),
        tail_error=max(part.tail_error for part in parts),
        ids_moved=sum(part.ids_moved for part in parts),
    )


@dataclass(frozen=True)
class CacheFidelity:
    """The cached targets of the probe rows against the dense teacher.

    Attributes:
        bytes_per_token: of the whole cache, everything counted but the rank table.
        tolerance: nats beyond which a row is wrong.
        rows: one for each probe row, by sample id.
    """

    path: str
    top_k: int
    value_dtype: str
    bytes_per_token: float
    tolerance: float
    rows: list[RowFidelity]

    @classmethod
    def of(cls, path: Path | str, rows: list[RowFidelity], tolerance: float) -> CacheFidelity:
        """``path`` holds the cache the rows were read from. Raises CacheError where no cache can be opened there."""
        seen = inspect(path, sample_rows=0)
        return cls(str(path), seen["top_k"], seen["value_dtype"], seen["bytes_per_token"], tolerance, rows)

    @property
    def worst(self) -> RowFidelity:
        """The row with the largest error; one that cannot be read before all others."""
        return max(self.rows, key=lambda row: (row.problem is not None, row.error))

    @property
    def wrong(self) -> list[RowFidelity]:
        """Rows that cannot be read or differ from the dense teacher by more than the tolerance."""
        return [row for row in self.rows if row.problem is not None or row.error > self.tolerance]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        wrong = [row.sample for row in self.wrong]
        return {**asdict(self), "worst_sample": self.worst.sample, "wrong_samples": wrong, "ok": not wrong}

    def text(self) -> str:
        """A few lines: how near the cache is, and every row that is wrong."""
        lines = [
            f"{self.path}: {len(self.rows)} rows, top {self.top_k}, {self.value_dtype}, "
            f"{self.bytes_per_token:.0f} bytes per token"
        ]
        readable = [row for row in self.rows if row.problem is None]
        if readable:
            worst = max(readable, key=lambda row: row.error)
            lines.append(
                f"worst row: sample {worst.sample}, {worst.error:.2g} nats off the dense teacher at position "
                f"{worst.position} beyond its rounding (tolerance {self.tolerance:g}), {worst.ids_moved} ids moved"
            )
        return "\n".join(lines + [f"wrong: {self._why(row)}" for row in self.wrong])

    def _why(self, row: RowFidelity) -> str:
        if row.problem is not None:
            return row.problem
        return (
            f"sample {row.sample} differs from the dense teacher at position {row.position}: log-probabilities by up "
            f"to {row.logprob_error:.2g} nats, places of ids by {row.rank_error:.2g}, tail by {row.tail_error:.2g}; "
            f"`megatron-kd cache verify {self.path} --level deep` tells damage from another teacher"
        )
