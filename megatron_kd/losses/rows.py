"""Running a row kernel over a chunk of logits, and the output of a loss from the figures of its tokens.

c rows in a chunk, V columns, S saved floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.collectives import Pending, TensorParallelGroup
from megatron_kd.losses.geometry import row_blocks
from megatron_kd.losses.kernels import (
    CE,
    KD,
    STUDENT_MASS,
    TAIL,
    TEACHER_MASS,
    TOP1,
    RowBatch,
    RowKernel,
    RowValues,
    VocabRange,
)
from megatron_kd.losses.output import DivergenceOutput, DivergenceStatistics
from megatron_kd.losses.passes import Passes


@dataclass(frozen=True)
class Logits:
    """A chunk of logits [c, V] of the student, and of a full-vocabulary teacher; both are overwritten."""

    student: Tensor
    teacher: Tensor | None
    part: VocabRange

    def __getitem__(self, block: slice) -> tuple[Tensor, Tensor | None]:
        return self.student[block], None if self.teacher is None else self.teacher[block]

    def blocks(self, passes: Passes) -> list[slice]:
        """The blocks of rows in which the passes want the chunk."""
        rows, width = self.student.shape
        return chunk_blocks(
            passes, rows, width * self.student.dtype.itemsize, self.student.device, self.teacher is not None
        )


def chunk_blocks(passes: Passes, rows: int, row_bytes: int, device: torch.device, pair: bool) -> list[slice]:
    """The blocks of rows in which the passes want a chunk of rows of that size; ``pair`` with a teacher's beside it."""
    if not passes.in_blocks:
        return [slice(0, rows)] if rows else []
    # Over a pair the passes touch both and two temporaries of the size.
    return list(row_blocks(rows, row_bytes * (4 if pair else 1), device))


class ChunkRows:
    """The rows of one chunk on their way through a kernel.

    With one rank there is nothing to wait for: each block goes through all steps while it is in the cache, in
    ``finish``. With several, the constructor starts the first exchange, ``combine`` the second where there is one.
    """

    def __init__(self, kernel: RowKernel[Any, Any], arguments: LossArguments, logits: Logits, batch: RowBatch) -> None:
        self.kernel = kernel
        self.tp = arguments.tp
        self.logits = logits
        self.rows = kernel.prepare(batch)
        self.blocks = logits.blocks(kernel.passes)
        self.works: list[Any] = []
        self.first: Pending | None = None
        self.second: Pending | None = None
        if self.tp.size > 1:
            self.works = [self._begin(block) for block in self.blocks]
            self.first = self.tp.start_stack(torch.cat([work.packed for work in self.works], dim=1))

    def _begin(self, block: slice) -> Any:
        return self.kernel.begin(*self.logits[block], self.rows[block], self.logits.part)

    def combine(self) -> None:
        """Takes the first exchange and starts the second, if the divergence has one."""
        if self.first is not None:
            self.second = _combine(self.kernel, self.tp, self.works, self.blocks, self.first.wait())
            self.first = None

    def finish(self, scale: Tensor | None) -> RowValues:
        """Figures [6, c] and saved [S, c]; with ``scale`` [c] the logits become scale·dL/dlogits."""
        if self.tp.size == 1:
            return _joined([self._at_once(block, None if scale is None else scale[block]) for block in self.blocks])
        self.combine()
        return _finish(self.kernel, self.works, self.blocks, self.second, scale)

    def _at_once(self, block: slice, scale: Tensor | None) -> RowValues:
        work = self._begin(block)
        second = self.kernel.combine(work, work.packed.unsqueeze(0))
        return self.kernel.finish(work, None if second is None else second.unsqueeze(0), scale)


def _combine(
    kernel: RowKernel[Any, Any], tp: TensorParallelGroup, works: list[Any], blocks: list[slice], gathered: Tensor
) -> Pending | None:
    """Gives each block its part of the first exchange [tp, F, c]; starts the second, if the divergence has one."""
    parts = [kernel.combine(work, gathered[:, :, block]) for work, block in zip(works, blocks, strict=True)]
    present = [part for part in parts if part is not None]
    return tp.start_stack(torch.cat(present, dim=1)) if present else None


def _finish(
    kernel: RowKernel[Any, Any], works: list[Any], blocks: list[slice], second: Pending | None, scale: Tensor | None
) -> RowValues:
    """Gives each block its part of the second exchange, once it is there, and of ``scale`` [c]."""
    gathered = None if second is None else second.wait()
    return _joined(
        [
            kernel.finish(
                work,
                None if gathered is None else gathered[:, :, block],
                None if scale is None else scale[block],
            )
            for work, block in zip(works, blocks, strict=True)
        ]
    )


def _joined(values: list[RowValues]) -> RowValues:
    return RowValues(
        torch.cat([value.figures for value in values], dim=1), torch.cat([value.saved for value in values], dim=1)
    )


class TiledRows:
    """The rows of a chunk whose logits come as one slice of the vocabulary after another.

    ``blocks`` are those of the widest slice, so that all slices are worked on in the same blocks of rows.
    """

    def __init__(
        self, kernel: RowKernel[Any, Any], arguments: LossArguments, batch: RowBatch, blocks: list[slice]
    ) -> None:
        self.kernel = kernel
        self.tp = arguments.tp
        self.blocks = blocks
        self.rows = kernel.prepare(batch)
        self.works: list[Any] = [None for _ in blocks]

    def add(self, logits: Logits) -> None:
        """Takes the sums of the next slice."""
        for number, block in enumerate(self.blocks):
            work = self.kernel.begin(*logits[block], self.rows[block], logits.part)
            before = self.works[number]
            self.works[number] = self.kernel.merge([work] if before is None else [before, work])

    def finish(self) -> RowValues:
        """As ``ChunkRows.finish`` without a gradient. One or two exchanges."""
        packed = torch.cat([work.packed for work in self.works], dim=1)
        second = _combine(self.kernel, self.tp, self.works, self.blocks, self.tp.stack(packed))
        return _finish(self.kernel, self.works, self.blocks, second, None)

    def gradient(self, logits: Logits, saved: Tensor, scale: Tensor) -> None:
        """Fresh logits of a slice [c, C] → scale·dL/dlogits in place, by saved [S, c]; no communication."""
        for block in self.blocks:
            self.kernel.gradient(*logits[block], self.rows[block], logits.part, saved[:, block], scale[block])


def chunk_gradient(
    kernel: RowKernel[Any, Any], arguments: LossArguments, logits: Logits, batch: RowBatch, saved: Tensor, scale: Tensor
) -> None:
    """``TiledRows.gradient`` for logits that are one slice."""
    TiledRows(kernel, arguments, batch, logits.blocks(kernel.passes)).gradient(logits, saved, scale)


def per_token_loss(arguments: LossArguments, figures: Tensor) -> Tensor:
    """[n], from figures [6, n] whose divergence is already summed over the ranks."""
    loss = (figures[KD] + figures[TAIL]).mul_(arguments.kd_scale)
    return loss.add_(figures[CE], alpha=arguments.ce_weight) if arguments.mixes_ce else loss


def output(arguments: LossArguments, loss: Tensor, figures: Tensor) -> DivergenceOutput:
    """The result of a loss over N tokens from its scalar and the figures [6, N]."""
    return DivergenceOutput(
        loss=loss,
        loss_per_token=per_token_loss(arguments, figures),
        statistics=DivergenceStatistics(
            teacher_mass=figures[TEACHER_MASS],
            student_mass=figures[STUDENT_MASS],
            tail=figures[TAIL] * arguments.t2,
            top1_agreement=figures[TOP1],
            kd_per_token=(figures[KD] + figures[TAIL]).mul_(arguments.t2) if arguments.mixes_ce else None,
            ce_per_token=figures[CE] if arguments.mixes_ce else None,
        ),
    )
