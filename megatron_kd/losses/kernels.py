"""What a row kernel is: the elementwise half of a fused loss, between the logits GEMM and the two gradient GEMMs.

A kernel works on a block of n rows in three steps, with exchanges over the tensor-parallel group between them:

    work = kernel.begin(logits, teacher_logits, rows, part)  local sums
    second = kernel.combine(work, all_gather(work.packed))   global normalisers; [1, n] for a second exchange, or None
    values = kernel.finish(work, all_gather(second), scale)  the logits become scale·dL/dlogits, in place

The driver puts other work between the steps, which is where the exchanges hide. Where the vocabulary comes in slices,
their works are merged before ``combine``. ``kernel.gradient`` forms the same gradient from fresh logits and saved
normalisers, without an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from megatron_kd.losses.arguments import IGNORED_LABEL, LossArguments
from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.logits import owned_columns
from megatron_kd.losses.passes import FullPass, Passes, TopKPass

# The rows of RowValues.figures. KD is the part of this rank's vocabulary, to be summed over the ranks at the end.
KD, TAIL, CE, TEACHER_MASS, STUDENT_MASS, TOP1 = range(6)
FIGURES = 6


@dataclass(frozen=True)
class VocabRange:
    """The columns of a block: ``rows`` ids of the vocabulary from ``start`` on."""

    start: int
    rows: int


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
    """What ``begin`` leaves for the later steps."""

    @property
    def packed(self) -> Tensor:
        """[F, n], this rank's part of the first exchange."""


class Rows(Protocol):
    """What ``prepare`` leaves: n rows, of which a block can be taken."""

    def __getitem__(self, part: slice) -> Self:
        """A block of the rows."""


class RowKernel[R: Rows, W: RowWork](Protocol):
    """The elementwise half of a fused loss. Logits are [n, V]; those of the teacher are None for cached targets.

    Attributes:
        saved_rows: S of ``RowValues.saved``.
        tileable: whether a block may come as slices of the vocabulary.
    """

    passes: Passes
    divergence: Divergence
    saved_rows: int
    tileable: bool

    def reads_again(self) -> tuple[Tensor, ...]:
        """The tensors of the caller that ``prepare`` reads, again in backward."""

    def prepare(self, batch: RowBatch) -> R:
        """What does not depend on the logits, once for all blocks of a chunk."""

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, rows: R, part: VocabRange) -> W:
        """The local sums. Overwrites the logits."""

    def merge(self, works: list[W]) -> W:
        """The works of consecutive slices of the vocabulary as one, whose logits are gone."""

    def combine(self, work: W, gathered: Tensor) -> Tensor | None:
        """Takes [tp, F, n] in rank order; returns this rank's part [1, n] of a second exchange, or None."""

    def finish(self, work: W, gathered: Tensor | None, scale: Tensor | None) -> RowValues:
        """Takes the second exchange [tp, 1, n]. With ``scale`` [n] the logits become scale·dL/dlogits."""

    def gradient(
        self, logits: Tensor, teacher_logits: Tensor | None, rows: R, part: VocabRange, saved: Tensor, scale: Tensor
    ) -> None:
        """Overwrites fresh logits with scale·dL/dlogits, by the saved normalisers."""


@dataclass(frozen=True)
class Labels:
    """Hard labels of n rows: ids int64 [n, 1] (−1 for none) and the weight of the cross-entropy [n], 0 for none."""

    ids: Tensor
    weight: Tensor

    def __getitem__(self, part: slice) -> Labels:
        return Labels(self.ids[part], self.weight[part])


def label_rows(arguments: LossArguments, batch: RowBatch) -> Labels | None:
    """None where the loss mixes no cross-entropy."""
    if batch.labels is None:
        return None
    counted = (batch.labels != IGNORED_LABEL) & batch.valid
    ids = torch.where(counted, batch.labels, -1).to(torch.int64)
    return Labels(ids[:, None], counted.to(arguments.dtype) * arguments.ce_weight)


@dataclass(frozen=True)
class LabelPart:
    """The labels as a shard sees them: column and z [n, 1], z = −inf where another shard has it."""

    columns: Tensor
    owned: Tensor
    z: Tensor

    @staticmethod
    def of(labels: Labels | None, block: TopKPass | FullPass, part: VocabRange) -> LabelPart | None:
        """Reads z from a block in which nothing is hidden yet."""
        if labels is None:
            return None
        columns, owned = owned_columns(labels.ids, part.start, part.rows)
        return LabelPart(columns, owned, block.take(columns, owned))

    def subtract(self, block: TopKPass | FullPass, ce_scale: Tensor) -> None:
        """The −1 of the cross-entropy's gradient at the label; ``ce_scale`` [n]."""
        block.add(self.columns, torch.where(self.owned, -ce_scale[:, None], 0.0), self.z)
