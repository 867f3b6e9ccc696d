"""One chunk after another: hidden rows in, logits out, gradients back. The loop of the fused loss is made of these.

c rows in a chunk, s slices (tensor-parallel ranks under sequence parallelism, else 1), D hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.geometry import DEFAULT_CHUNK_BYTES, RowPlan, chunk_rows
from megatron_kd.losses.kernels import RowBatch
from megatron_kd.losses.projection import Projection


@dataclass(frozen=True)
class Head:
    """Hidden states (local rows) and the head they are projected by; neither is ever written to."""

    hidden: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Chunk:
    """One chunk: the gathered hidden rows [c, D], logits [c, V] (a buffer that the next chunk reuses)."""

    columns: slice
    batch: RowBatch
    hidden: Tensor
    logits: Tensor
    teacher_logits: Tensor | None


def chunk_columns(arguments: LossArguments, plan: RowPlan, buffers: int, chunk_bytes: int | None, kind: str) -> int:
    """Columns in a chunk; ``buffers`` matrices of [c, V] share ``chunk_bytes`` (None: the default of the device).

    The shard is taken as ⌈vocabulary/tp⌉ rows, so that ranks with uneven shards cut alike.
    """
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    budget = chunk_bytes or DEFAULT_CHUNK_BYTES.get(kind, DEFAULT_CHUNK_BYTES["cuda"])
    shard = -(-arguments.vocab_size // arguments.tp.size)
    itemsize = 8 if arguments.dtype == torch.float64 else 4
    rows = chunk_rows(plan.columns * plan.slices, shard * itemsize * buffers, budget)
    return max(1, rows // plan.slices)


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
    """Yields the chunks of a call, and takes the gradients of each.

    Collectives per chunk: under sequence parallelism an all_gather of the hidden rows (of the teacher's too) and a
    reduce_scatter of dH; otherwise an all_reduce of dH. Chunks without a valid row do not exist, on any rank.
    """

    def __init__(
        self, arguments: LossArguments, plan: RowPlan, columns: int, student: Head, teacher: Head | None
    ) -> None:
        self.arguments = arguments
        self.plan = plan
        self.columns = columns
        self.student = student
        self.teacher = teacher
        self.projection = Projection(student.weight, arguments.vocab_rows, arguments.dtype)
        self.weights = arguments.token_weights.to(student.hidden.device, arguments.dtype, non_blocking=True)
        self.labels = None if arguments.labels is None else arguments.labels.to(student.hidden.device)

    def __iter__(self) -> Iterator[Chunk]:
        plan, device, dtype = self.plan, self.student.hidden.device, self.arguments.dtype
        most = min(self.columns, plan.columns) * plan.slices
        shape = (most, self.arguments.vocab_rows)
        buffer = torch.empty(shape, device=device, dtype=dtype) if most else None
        teacher_buffer = None
        if self.teacher is not None and most:
            teacher_buffer = torch.empty(shape, device=device, dtype=dtype)
            teacher_projection = Projection(self.teacher.weight, self.arguments.vocab_rows, dtype)
        for start in range(0, plan.columns, self.columns):
            assert buffer is not None
            columns = slice(start, min(plan.columns, start + self.columns))
            rows = plan.global_rows(columns, device)
            batch = RowBatch(rows, self.weights[rows], None if self.labels is None else self.labels[rows])
            hidden = self._rows(self.student.hidden, columns)
            logits = buffer[: rows.shape[0]]
            self.projection.logits(hidden, out=logits)
            teacher_logits = None
            if self.teacher is not None and teacher_buffer is not None:
                teacher_logits = teacher_buffer[: rows.shape[0]]
                teacher_projection.logits(self._rows(self.teacher.hidden, columns), out=teacher_logits)
            yield Chunk(columns, batch, hidden, logits, teacher_logits)

    def _rows(self, hidden: Tensor, columns: slice) -> Tensor:
        tp = self.arguments.tp
        if self.plan.slices == 1:
            return take_rows(hidden, self.plan.local_rows(columns, 0))
        return tp.gather_rows(take_rows(hidden, self.plan.local_rows(columns, tp.rank)))

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

    def put_hidden_gradient(self, chunk: Chunk, gradient: Tensor) -> None:
        """dH of the chunk, whose logits are dz by now, into ``gradient`` [n, D]."""
        part = self.projection.hidden_gradient(chunk.logits, chunk.hidden)
        tp, local = self.arguments.tp, 0
        if self.plan.slices == 1:
            part = tp.sum_(part)
        else:
            part, local = tp.reduce_scatter_rows(part), tp.rank
        gradient[self.plan.local_rows(chunk.columns, local)] = part.to(gradient.dtype)

    def add_weight_gradient(self, chunk: Chunk, accumulator: Tensor, first: bool) -> None:
        """accumulator [Vl, D] += dzᵀ·h in its first V rows."""
        rows = self.arguments.vocab_rows
        self.projection.add_weight_gradient(chunk.logits, chunk.hidden, accumulator[:rows], first)
