"""The fused loss: projection, divergence and both gradients chunk by chunk, [N, V] never in memory.

N tokens, n of them on this rank under sequence parallelism, D hidden, V vocabulary rows of this rank, S saved floats.
FLOP by mode, P = 2·N·D·V: single_pass 3P, frozen_head 2P, recompute 4P, no_grad 1P (and one projection by the
teacher's head a pass over the logits with a full-vocabulary teacher).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.chunks import Chunk, ChunkLoop, GradientSink, Head
from megatron_kd.losses.geometry import Geometry, RowPlan
from megatron_kd.losses.kernels import FIGURES, KD, RowKernel
from megatron_kd.losses.rows import ChunkRows, TiledRows, chunk_blocks, chunk_gradient, per_token_loss


def versioned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Those that autograd can watch for changes: tensors of an inference mode have no version, and are refused."""
    return tuple(tensor for tensor in tensors if not tensor.is_inference())


@dataclass(frozen=True)
class FusedJob:
    """A call, without the tensors that the backward pass may do without."""

    arguments: LossArguments
    kernel: RowKernel[Any, Any]
    plan: RowPlan
    geometry: Geometry

    def loop(self, student: Head, teacher: Head | None) -> ChunkLoop:
        """The chunks of these tensors."""
        return ChunkLoop(self.arguments, self.plan, self.geometry, student, teacher)

    def reads_again(self) -> tuple[Tensor, ...]:
        """What a backward pass reads beside hidden states and heads, and the caller must not have changed."""
        arguments = self.arguments
        labels = () if arguments.labels is None else (arguments.labels,)
        return versioned(arguments.token_weights, *labels, *self.kernel.reads_again())


@dataclass(frozen=True)
class Gradients:
    """dH [n, D] and dW [Vl, D]; None for what is not wanted."""

    hidden: Tensor | None
    weight: Tensor | None

    def __bool__(self) -> bool:
        return self.hidden is not None or self.weight is not None


@dataclass(frozen=True)
class ForwardResult:
    """Σ w·l, figures [6, N], and saved [S, rows computed] where asked for."""

    loss: Tensor
    figures: Tensor
    saved: Tensor | None
    gradients: Gradients


def fused_forward(
    job: FusedJob, student: Head, teacher: Head | None, *, wants: tuple[bool, bool], save: bool
) -> ForwardResult:
    """One pass over the chunks; ``wants`` says which of (dH, dW) are formed on the way, for an upstream of 1."""
    arguments, plan = job.arguments, job.plan
    loop = job.loop(student, teacher)
    gradients = Gradients(
        loop.new_hidden_gradient() if wants[0] else None, loop.new_weight_gradient() if wants[1] else None
    )
    device = student.hidden.device
    figures = torch.zeros(FIGURES, arguments.tokens, device=device, dtype=arguments.dtype)
    saved = figures.new_empty(job.kernel.saved_rows, plan.columns * plan.slices) if save else None
    steps = _tiled_steps(job, loop) if loop.tiled else _chunk_steps(job, loop, gradients)
    for chunk, values in steps:
        figures.index_copy_(1, chunk.batch.rows, values.figures)
        if saved is not None:
            saved[:, _computed(plan, chunk)] = values.saved
    arguments.tp.sum_(figures[KD])
    loss = (per_token_loss(arguments, figures) * loop.weights).sum()
    return ForwardResult(loss, figures, saved, gradients)


def _computed(plan: RowPlan, chunk: Chunk) -> slice:
    return slice(chunk.columns.start * plan.slices, chunk.columns.stop * plan.slices)


def _chunk_steps(job: FusedJob, loop: ChunkLoop, gradients: Gradients) -> Iterator[tuple[Chunk, Any]]:
    """(chunk, values) in order, the gradients taken.

    With several ranks, chunk i waits for its exchange while the logits of chunk i + 1 are computed in the other
    buffer; a second exchange runs beside the row statistics of chunk i + 1.
    """
    overlaps = job.arguments.tp.size > 1
    sink = GradientSink(loop, gradients.hidden, gradients.weight, weight_is_new=True)

    def settle(chunk: Chunk, rows: ChunkRows) -> tuple[Chunk, Any]:
        values = rows.finish(chunk.batch.weights if gradients else None)
        sink.take(chunk, rows.logits.student)
        return chunk, values

    waiting: tuple[Chunk, ChunkRows] | None = None
    for number, chunk in enumerate(loop):
        logits = loop.logits(chunk, buffer=number % 2 if overlaps else 0)
        if waiting is not None:
            waiting[1].combine()
        current = chunk, ChunkRows(job.kernel, job.arguments, logits, chunk.batch)
        if waiting is not None:
            yield settle(*waiting)
        waiting = current
        if not overlaps:
            yield settle(*waiting)
            waiting = None
    if waiting is not None:
        yield settle(*waiting)


def _tiled_steps(job: FusedJob, loop: ChunkLoop) -> Iterator[tuple[Chunk, Any]]:
    """(chunk, values) in order, the vocabulary in slices."""
    for chunk in loop:
        rows = _tiled_rows(job, loop, chunk)
        for part in range(len(loop.slices)):
            rows.add(loop.logits(chunk, part))
        yield chunk, rows.finish()


def _tiled_rows(job: FusedJob, loop: ChunkLoop, chunk: Chunk) -> TiledRows:
    rows, device = chunk.batch.rows.shape[0], chunk.hidden.device
    row_bytes = loop.width * job.arguments.dtype.itemsize
    blocks = chunk_blocks(job.kernel.passes, rows, row_bytes, device, loop.teacher is not None)
    return TiledRows(job.kernel, job.arguments, chunk.batch, blocks)


def recompute_backward(
    job: FusedJob,
    student: Head,
    teacher: Head | None,
    saved: Tensor,
    upstream: Tensor,
    *,
    wants_hidden: bool,
    weight_into: Tensor | None,
    wants_weight: bool,
) -> Gradients:
    """The logits once more, their gradient by the saved normalisers, then the two gradient GEMMs.

    ``weight_into`` [Vl, D] is added to where given (Megatron-Core's main_grad), else dW is made anew.
    """
    loop = job.loop(student, teacher)
    hidden = loop.new_hidden_gradient() if wants_hidden else None
    weight = None
    if wants_weight:
        weight = loop.new_weight_gradient() if weight_into is None else weight_into
    sink = GradientSink(loop, hidden, weight, weight_is_new=weight_into is None)
    for chunk in loop:
        part = saved[:, _computed(job.plan, chunk)]
        scale = chunk.batch.weights * upstream
        if loop.tiled:
            sink.take_tiles(chunk, _tile_gradients(job, loop, chunk, part, scale))
        else:
            logits = loop.logits(chunk)
            chunk_gradient(job.kernel, job.arguments, logits, chunk.batch, part, scale)
            sink.take(chunk, logits.student)
    return Gradients(hidden, weight)


def _tile_gradients(job: FusedJob, loop: ChunkLoop, chunk: Chunk, saved: Tensor, scale: Tensor) -> Iterator[Tensor]:
    rows = _tiled_rows(job, loop, chunk)
    for part in range(len(loop.slices)):
        logits = loop.logits(chunk, part)
        rows.gradient(logits, saved, scale)
        yield logits.student
