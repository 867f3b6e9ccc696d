"""What a row kernel is: the elementwise half of a fused loss, between the logits GEMM and the two gradient GEMMs.

A kernel works on a block of n rows in two halves, with the exchange over the tensor-parallel group between them:

    work = kernel.begin(logits, teacher_logits, rows)        local sums; the logits become exponentials, in place
    gathered = all_gather(work.packed)                       [tp, F, n], the only exchange
    values = kernel.finish(work, gathered, gradient_scale)   the logits become w·dL/dlogits, in place

The driver may put other work between the halves, which is where an overlapped exchange fits. ``kernel.gradient``
forms the same gradient from fresh logits and saved normalisers, without an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_kd.losses.arguments import IGNORED_LABEL, LossArguments

# The rows of RowValues.figures. KD is the part of this rank's ids, to be summed over the ranks at the end.
KD, TAIL, CE, TEACHER_MASS, STUDENT_MASS, TOP1 = range(6)
FIGURES = 6


@dataclass(frozen=True)
class RowBatch:
    """n rows of the N tokens.

    Attributes:
        rows: int64 [n], their global numbers.
        weights: [n], their token weights in the dtype of the arithmetic.
        labels: int64 [n], −100 for no label; None without cross-entropy.
    """

    rows: Tensor
    weights: Tensor
    labels: Tensor | None

    def __getitem__(self, part: slice) -> RowBatch:
        return RowBatch(self.rows[part], self.weights[part], None if self.labels is None else self.labels[part])

    @property
    def valid(self) -> Tensor:
        """bool [n], where the weight is not 0."""
        return self.weights != 0


@dataclass(frozen=True)
class RowValues:
    """figures [6, n] (the rows named above), 0 where the weight is 0; saved [S, n], what ``gradient`` needs again."""

    figures: Tensor
    saved: Tensor


class RowWork(Protocol):
    """What ``begin`` leaves for ``finish``."""

    @property
    def packed(self) -> Tensor:
        """[F, n], this rank's part of the exchange."""


class RowKernel[W: RowWork](Protocol):
    """The elementwise half of a fused loss. Logits are [n, V]; those of the teacher are None for cached targets."""

    saved_rows: int

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch) -> W:
        """The local half. Overwrites the logits."""

    def finish(self, work: W, gathered: Tensor, scale: Tensor | None) -> RowValues:
        """The global half. With ``scale`` [n] (w, or g·w) the logits become scale·dL/dlogits."""

    def gradient(
        self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch, saved: Tensor, scale: Tensor
    ) -> None:
        """Overwrites fresh logits with scale·dL/dlogits, by the saved normalisers."""


def label_rows(arguments: LossArguments, batch: RowBatch) -> tuple[Tensor, Tensor]:
    """(labels [n, 1] as int64, −1 for none; weight of the cross-entropy [n]: ce_weight where there is a label)."""
    assert batch.labels is not None
    counted = (batch.labels != IGNORED_LABEL) & batch.valid
    labels = torch.where(counted, batch.labels, -1).to(torch.int64)
    return labels[:, None], counted.to(arguments.dtype) * arguments.ce_weight
