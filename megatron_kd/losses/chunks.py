"""One chunk after another: hidden rows in, logits out, gradients back. The loops of the fused loss are made of these.

c rows in a chunk, s slices (tensor-parallel ranks under sequence parallelism, else 1), D hidden, V vocabulary rows of
this rank, C of them in a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.collectives import Pending
from megatron_kd.losses.geometry import Geometry, RowPlan
from megatron_kd.losses.kernels import RowBatch, VocabRange
from megatron_kd.losses.projection import Projection
from megatron_kd.losses.rows import Logits


@dataclass(frozen=True)
class Head:
    """Hidden states (local rows) and the head they are projected by; neither is ever written to."""

    hidden: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of one chunk: hidden states [c, D] as all ranks have them, and the teacher's."""

    columns: slice
    batch: RowBatch
    hidden: Tensor
    teacher_hidden: Tensor | None


def take_rows(hidden: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of hidden [n, D] or [s, b, D] (counted s·B + b) as [c, D]; of a view that cannot be flattened without a
    copy of everything, only the rows are copied."""
    if hidden.dim() == 2:
        return hidden[rows]
    batch = hidden.shape[1]
    if batch == 1 or hidden.stride(0) == batch * hidden.stride(1):
        return hidden.flatten(0, 1)[rows]
    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device=hidden.device)
    return hidden[rows // batch, rows % batch]


class ChunkLoop:
    """The chunks of a call, their logits, and the gradients that are taken of them.

    Collectives per chunk: under
    sequence parallelism an all_gather of the hidden rows (of the teacher's too), asked for one chunk ahead, and a
    reduce_scatter of dH; otherwise an all_reduce of dH. Chunks without a valid row do not exist, on any rank.
    """

    def __init__(
        self,
        arguments: LossArguments,
        plan: RowPlan,
        geometry: Geometry,
        student: Head,
        teacher: Head | None,
    ) -> None:
        self.arguments = arguments
        self.plan = plan
        self.step = geometry.step
        self.tiled = geometry.width is not None
        self.student = student
        self.teacher = teacher
        self.weights = arguments.device_weights
        self.labels = arguments.device_labels
        rows = arguments.vocab_rows
        self.width = rows if geometry.width is None else min(geometry.width, rows)
        # A shard of nothing but padding still has one slice, of no columns.
        starts = range(0, max(1, rows), max(1, self.width))
        self.slices = [slice(start, min(rows, start + self.width)) for start in starts]
        self.projections = [Projection(student.weight, part, arguments.dtype) for part in self.slices]
        self._teacher_projections = (
            [] if teacher is None else [Projection(teacher.weight, part, arguments.dtype) for part in self.slices]
        )
        self._buffers: dict[tuple[int, bool], Tensor] = {}

    def __iter__(self) -> Iterator[Chunk]:
        plan, device = self.plan, self.student.hidden.device
        columns = [slice(start, min(plan.columns, start + self.step)) for start in range(0, plan.columns, self.step)]
        coming = self._start_rows(columns[0]) if columns else None
        for number, part in enumerate(columns):
            assert coming is not None
            hidden, teacher_hidden = (None if pending is None else pending.wait() for pending in coming)
            assert hidden is not None
            coming = self._start_rows(columns[number + 1]) if number + 1 < len(columns) else None
            rows = plan.global_rows(part, device)
            batch = RowBatch(rows, self.weights[rows], None if self.labels is None else self.labels[rows])
            yield Chunk(part, batch, hidden, teacher_hidden)

    def _start_rows(self, columns: slice) -> tuple[Pending, Pending | None]:
        teacher = None if self.teacher is None else self._start_gather(self.teacher.hidden, columns)
        return self._start_gather(self.student.hidden, columns), teacher

    def _start_gather(self, hidden: Tensor, columns: slice) -> Pending:
        tp = self.arguments.tp
        if self.plan.slices == 1:
            return Pending(take_rows(hidden, self.plan.local_rows(columns, 0)), None)
        return tp.start_gather_rows(take_rows(hidden, self.plan.local_rows(columns, tp.rank)))

    def logits(self, chunk: Chunk, part: int = 0, buffer: int = 0) -> Logits:
        """The logits of a slice of the vocabulary, in buffer number ``buffer``, whatever it held before."""
        columns = self.slices[part]
        student = self._buffer(buffer, False, chunk, columns)
        self.projections[part].logits(chunk.hidden, out=student)
        teacher = None
        if chunk.teacher_hidden is not None:
            teacher = self._buffer(buffer, True, chunk, columns)
            self._teacher_projections[part].logits(chunk.teacher_hidden, out=teacher)
        vocab = VocabRange(self.arguments.vocab_start + columns.start, columns.stop - columns.start)
        return Logits(student, teacher, vocab)

    def _buffer(self, number: int, teacher: bool, chunk: Chunk, columns: slice) -> Tensor:
        rows, width = chunk.batch.rows.shape[0], columns.stop - columns.start
        key = (number, teacher)
        if key not in self._buffers:
            most = min(self.step, self.plan.columns) * self.plan.slices
            shape = (most * self.width,)
            self._buffers[key] = torch.empty(shape, device=chunk.hidden.device, dtype=self.arguments.dtype)
        return self._buffers[key][: rows * width].view(rows, width)

    def new_hidden_gradient(self) -> Tensor:
        """[n, D] for this rank's rows: zeros where some rows are left out, else memory that the chunks fill."""
        hidden = self.student.hidden
        shape = (hidden.shape[:-1].numel(), hidden.shape[-1])
        make = torch.empty if self.plan.table is None else torch.zeros
        return make(shape, dtype=hidden.dtype, device=hidden.device)

    def new_weight_gradient(self) -> Tensor:
        """[Vl, D] in the dtype of the arithmetic; only the padding is set (the first chunk overwrites the rest)."""
        weight, rows = self.student.weight, self.arguments.vocab_rows
        gradient = torch.empty(weight.shape, dtype=self.arguments.dtype, device=weight.device)
        gradient[0 if self.plan.columns == 0 else rows :].zero_()
        return gradient


class GradientSink:
    """Takes dz of chunk after chunk into dH [n, D] and dW [Vl, D] (either may be None)."""

    def __init__(self, loop: ChunkLoop, hidden: Tensor | None, weight: Tensor | None, *, weight_is_new: bool) -> None:
        self.loop = loop
        self.hidden = hidden
        self.weight = weight
        self.weight_is_new = weight_is_new

    def take(self, chunk: Chunk, dz: Tensor) -> None:
        """One chunk whose dz [c, V] covers the shard. The reduction of dH runs beside the GEMM of dW."""
        projection = self.loop.projections[0]
        narrow = projection.narrow(dz, chunk.hidden)
        pending = None
        if self.hidden is not None:
            pending = self._reduce(projection.hidden_gradient(narrow, chunk.hidden))
        self._add_weight(chunk, 0, narrow)
        if pending is not None:
            self._put(chunk, pending)

    def take_tiles(self, chunk: Chunk, tiles: Iterator[Tensor]) -> None:
        """One chunk whose dz comes as slices of the vocabulary [c, C]: dH is summed over them first."""
        total: Tensor | None = None
        for part, dz in enumerate(tiles):
            projection = self.loop.projections[part]
            narrow = projection.narrow(dz, chunk.hidden)
            if self.hidden is not None:
                if total is None:
                    total = torch.zeros(chunk.hidden.shape, dtype=self.loop.arguments.dtype, device=chunk.hidden.device)
                projection.hidden_gradient(narrow, chunk.hidden, total)
            self._add_weight(chunk, part, narrow)
        if total is not None:
            self._put(chunk, self._reduce(total))

    def _reduce(self, part: Tensor) -> Pending:
        return self.loop.arguments.tp.start_sum_rows(part, scatter=self.loop.plan.slices > 1)

    def _put(self, chunk: Chunk, pending: Pending) -> None:
        assert self.hidden is not None
        plan = self.loop.plan
        local = self.loop.arguments.tp.rank if plan.slices > 1 else 0
        self.hidden[plan.local_rows(chunk.columns, local)] = pending.wait().to(self.hidden.dtype)

    def _add_weight(self, chunk: Chunk, part: int, narrow: Tensor) -> None:
        if self.weight is None:
            return
        first = self.weight_is_new and chunk.columns.start == 0
        into = self.weight[self.loop.slices[part]]
        self.loop.projections[part].add_weight_gradient(narrow, chunk.hidden, into, first)
