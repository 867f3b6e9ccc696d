"""The forward-chunked reference: projection and loss chunk by chunk in forward, each chunk's logits kept for backward.

The published middle way, for the ablation: the elementwise work never sees more than a chunk, but autograd holds
float32 logits of all chunks once, N·V in the end. FLOP: 3P (P = 2·N·D·V).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_kd.losses.arguments import LossArguments, Settings
from megatron_kd.losses.autograd import Source, bytes_per_logit, make_kernel, refuse_second_order
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.collectives import enter_sharded
from megatron_kd.losses.fused import versioned
from megatron_kd.losses.geometry import RowPlan, plan_geometry
from megatron_kd.losses.head_product import HeadProduct
from megatron_kd.losses.kernels import FIGURES, KD, RowBatch, RowKernel, VocabRange
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.rows import ChunkRows, Logits, chunk_gradient, output, per_token_loss


def run_forward_chunked(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    """A loss from checked arguments. All rows are computed, those of weight 0 too."""
    kernel = make_kernel(source, arguments, settings)
    teacher = source if isinstance(source, Head) else None
    slices = arguments.tp.size if arguments.sequence_parallel else 1
    plan = RowPlan(arguments.tokens, slices, arguments.tokens // slices, None)
    shard = -(-arguments.vocab_size // arguments.tp.size)
    keeps_slope = kernel.passes.keeps_slope
    per_logit = bytes_per_logit(hidden, weight, source, arguments, keeps_slope=keeps_slope, overlaps=False)
    step = plan_geometry(plan, shard, per_logit, settings.chunk_bytes, hidden.device, tiles=False).step
    weights, labels = arguments.device_weights, arguments.device_labels
    figures = torch.zeros(FIGURES, arguments.tokens, device=hidden.device, dtype=arguments.dtype)

    with torch.autocast(hidden.device.type, enabled=False):
        head = HeadProduct(weight[: arguments.vocab_rows], arguments.dtype)
        teacher_head = teacher_parts = None
        parts = _flat(hidden).split(step)
        if teacher is not None:
            teacher_head = HeadProduct(teacher.weight.detach()[: arguments.vocab_rows], arguments.dtype)
            teacher_parts = _flat(teacher.hidden.detach()).split(step)
        # Connects the loss to its inputs even when there is no token.
        total = (head.head[:0].sum() + parts[0][:0].sum()).to(arguments.dtype)
        for number, part in enumerate(parts):
            columns = slice(number * step, number * step + part.shape[0])
            if columns.start == columns.stop:
                continue
            rows = plan.global_rows(columns, hidden.device)
            batch = RowBatch(rows, weights[rows], None if labels is None else labels[rows])
            logits = _project(part, head, arguments)
            teacher_logits = None
            if teacher_head is not None and teacher_parts is not None:
                teacher_logits = _project(teacher_parts[number], teacher_head, arguments)
            loss, chunk_figures = _ChunkLoss.apply(logits, teacher_logits, batch, kernel, arguments)
            total = total + loss
            figures.index_copy_(1, rows, chunk_figures)
    return output(arguments, total, figures)


def _flat(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _project(rows: Tensor, head: HeadProduct, arguments: LossArguments) -> Tensor:
    return head(enter_sharded(rows, arguments.tp, arguments.sequence_parallel))


class _ChunkLoss(torch.autograd.Function):
    """logits [c, V] → (Σ w·l, figures [6, c]); keeps the logits and forms their gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher_logits: Tensor | None,
        batch: RowBatch,
        kernel: RowKernel[Any, Any],
        arguments: LossArguments,
    ) -> tuple[Tensor, Tensor]:
        values = ChunkRows(kernel, arguments, _copies(logits, teacher_logits, arguments), batch).finish(None)
        arguments.tp.sum_(values.figures[KD])
        ctx.save_for_backward(logits, teacher_logits, values.saved, *versioned(*kernel.reads_again()))
        ctx.batch, ctx.kernel, ctx.arguments = batch, kernel, arguments
        ctx.mark_non_differentiable(values.figures)
        return (per_token_loss(arguments, values.figures) * batch.weights).sum(), values.figures

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient: Tensor = _logits_gradient(ctx, refuse_second_order(upstream))
        return gradient, None, None, None, None


@once_differentiable
def _logits_gradient(ctx: Any, upstream: Tensor) -> Tensor:
    logits, teacher_logits, saved, *_ = ctx.saved_tensors
    copies = _copies(logits, teacher_logits, ctx.arguments)
    chunk_gradient(ctx.kernel, ctx.arguments, copies, ctx.batch, saved, ctx.batch.weights * upstream)
    return copies.student


def _copies(logits: Tensor, teacher_logits: Tensor | None, arguments: LossArguments) -> Logits:
    """The row kernels overwrite what they are given."""
    part = VocabRange(arguments.vocab_start, arguments.vocab_rows)
    return Logits(logits.clone(), None if teacher_logits is None else teacher_logits.clone(), part)
