"""The cached targets of a few rows, made ready for a row kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class TargetRows:
    """n rows with distinct ids.

    Attributes:
        ids: int32 [n, K], −1 where unused.
        p: [n, K], the teacher's probabilities, 0 where unused.
        mass: [n], Σp.
        tail: [n], the teacher's probability outside the ids, as measured when the targets were made.
        best: int64 [n, 1], the slot of the most likely id.
    """

    ids: Tensor
    p: Tensor
    mass: Tensor
    tail: Tensor
    best: Tensor

    def __getitem__(self, part: slice) -> TargetRows:
        return TargetRows(self.ids[part], self.p[part], self.mass[part], self.tail[part], self.best[part])


def target_rows(targets: TopKTargets, rows: Tensor | slice, valid: Tensor, dtype: torch.dtype) -> TargetRows:
    """Rows of flat targets [N, K]. Rows that are not ``valid`` [n] come out without ids and without mass.

    An id that occurs more than once in a row is merged: the divergences are not additive over copies of an id.
    Merging needs one sort of [n, K], nothing beside a pass over [n, V], so that it is always done.
    """
    ids = targets.ids[rows]
    used = (ids >= 0) & valid[:, None]
    ids = torch.where(used, ids, -1)
    p = torch.where(used, targets.logprobs[rows].to(dtype).exp(), 0.0)
    tail = torch.where(valid, targets.tail_logmass[rows].to(dtype).exp(), 0.0)

    ids, order = ids.sort(dim=1)
    starts = torch.ones_like(ids, dtype=torch.int64)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    run = starts.cumsum(dim=1) - 1
    merged_p = torch.zeros_like(p).scatter_add_(1, run, p.gather(1, order))
    # Copies write the same id into their slot, in whatever order.
    merged_ids = torch.full_like(ids, -1).scatter_(1, run, ids)
    return TargetRows(merged_ids, merged_p, merged_p.sum(dim=1), tail, merged_p.argmax(dim=1, keepdim=True))
