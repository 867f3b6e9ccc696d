"""The fused loss: projection, divergence and both gradients chunk by chunk, [N, V] never in memory.

N tokens, n of them on this rank under sequence parallelism, D hidden, V vocabulary rows of this rank, S saved floats.
FLOP by mode, P = 2·N·D·V: single_pass 3P, frozen_head 2P, recompute 4P, no_grad 1P (and one projection by the
teacher's head a pass over the logits with a full-vocabulary teacher).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.chunks import ChunkLoop, Head, chunk_columns
from megatron_kd.losses.geometry import RowPlan, plan_rows
from megatron_kd.losses.kernels import FIGURES, KD, RowKernel
from megatron_kd.losses.main_grad import accumulate_main_grad, check_main_grad, main_grad_of, wgrad_placeholder
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.rows import chunk_gradient, chunk_values, output, per_token_loss


@dataclass(frozen=True)
class FusedJob:
    """A call, without the tensors that the backward pass may do without."""

    arguments: LossArguments
    kernel: RowKernel[Any]
    plan: RowPlan
    columns: int
    mode: str
    main_grad: bool


def run_fused(
    hidden: Tensor,
    weight: Tensor,
    teacher: Head | None,
    arguments: LossArguments,
    kernel: RowKernel[Any],
    *,
    mode: str,
    chunk_bytes: int | None,
    main_grad_accumulation: bool,
) -> DivergenceOutput:
    """A fused loss from checked arguments in a resolved ``mode``."""
    if main_grad_accumulation and weight.requires_grad and mode != "no_grad":
        check_main_grad(weight)
    slices = arguments.tp.size if arguments.sequence_parallel else 1
    plan = plan_rows(arguments.token_weights, slices, hidden.device)
    buffers = 1 + (teacher is not None) + (arguments.logit_softcap is not None)
    columns = chunk_columns(arguments, plan, buffers, chunk_bytes, hidden.device.type)
    job = FusedJob(arguments, kernel, plan, columns, mode, main_grad_accumulation)
    if mode == "no_grad":
        with torch.no_grad():
            loss, figures, _ = _forward(hidden, weight, teacher, job, None, None, save=False)
    else:
        teacher_tensors = (None, None) if teacher is None else (teacher.hidden, teacher.weight)
        loss, figures = _FusedLoss.apply(hidden, weight, *teacher_tensors, job)
    return output(arguments, loss, figures)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    teacher: Head | None,
    job: FusedJob,
    hidden_gradient: Tensor | None,
    weight_gradient: Tensor | None,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, figures [6, N], saved [S, rows computed] or None); fills the gradients given, for an upstream of 1."""
    arguments, plan = job.arguments, job.plan
    with torch.autocast(hidden.device.type, enabled=False):
        loop = ChunkLoop(arguments, plan, job.columns, Head(hidden.detach(), weight), teacher)
        figures = torch.zeros(FIGURES, arguments.tokens, device=hidden.device, dtype=arguments.dtype)
        saved = None
        if save:
            saved = figures.new_empty(job.kernel.saved_rows, plan.columns * plan.slices)
        wants_gradient = hidden_gradient is not None or weight_gradient is not None
        for chunk in loop:
            scale = chunk.batch.weights if wants_gradient else None
            values = chunk_values(job.kernel, arguments, chunk.logits, chunk.teacher_logits, chunk.batch, scale)
            figures.index_copy_(1, chunk.batch.rows, values.figures)
            if saved is not None:
                saved[:, chunk.columns.start * plan.slices : chunk.columns.stop * plan.slices] = values.saved
            if hidden_gradient is not None:
                loop.put_hidden_gradient(chunk, hidden_gradient)
            if weight_gradient is not None:
                loop.add_weight_gradient(chunk, weight_gradient, first=chunk.columns.start == 0)
        arguments.tp.sum_(figures[KD])
        loss = (per_token_loss(arguments, figures) * loop.weights).sum()
    return loss, figures, saved


class _FusedLoss(torch.autograd.Function):
    """(hidden, weight) → loss. Gradients are formed in forward (single_pass) or from fresh logits in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor | None,
        teacher_weight: Tensor | None,
        job: FusedJob,
    ) -> tuple[Tensor, Tensor]:
        teacher = None
        if teacher_hidden is not None and teacher_weight is not None:
            teacher = Head(teacher_hidden, teacher_weight)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        ctx.job, ctx.head_parameter = job, weight
        ctx.hidden_gradient = ctx.weight_gradient = None
        ctx.hidden_shape, ctx.consumed = hidden.shape, False
        if job.mode == "recompute":
            loss, figures, saved = _forward(hidden, weight, teacher, job, None, None, save=True)
            ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, saved)
        else:
            loop = ChunkLoop(job.arguments, job.plan, job.columns, Head(hidden, weight), None)
            ctx.hidden_gradient = loop.new_hidden_gradient() if needs_hidden else None
            ctx.weight_gradient = loop.new_weight_gradient() if needs_weight else None
            loss, figures, _ = _forward(
                hidden, weight, teacher, job, ctx.hidden_gradient, ctx.weight_gradient, save=False
            )
        ctx.mark_non_differentiable(figures)
        return loss, figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        with torch.autocast(upstream.device.type, enabled=False):
            if ctx.job.mode == "recompute":
                hidden_gradient, weight_gradient = _recompute(ctx, upstream)
            else:
                hidden_gradient, weight_gradient = _scale(ctx, upstream)
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.view(ctx.hidden_shape)
        return hidden_gradient, weight_gradient, None, None, None


def _scale(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the single pass, scaled in place: a second copy of dH would cost what dense hidden states do."""
    if ctx.consumed:
        raise RuntimeError(
            "the gradient of a single-pass loss can be taken once: it was formed in forward and has been handed out; "
            "use mode='recompute' to go backward twice"
        )
    ctx.consumed = True
    hidden_gradient, weight_gradient = ctx.hidden_gradient, ctx.weight_gradient
    ctx.hidden_gradient = ctx.weight_gradient = None
    if hidden_gradient is not None:
        hidden_gradient.mul_(upstream)
    if weight_gradient is not None:
        if ctx.job.main_grad:
            accumulate_main_grad(ctx.head_parameter, weight_gradient, upstream)
            weight_gradient = wgrad_placeholder(ctx.head_parameter)
        else:
            weight_gradient = weight_gradient.mul_(upstream).to(ctx.head_parameter.dtype)
    return hidden_gradient, weight_gradient


def _recompute(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The logits once more, their gradient by the saved normalisers, then the two gradient GEMMs."""
    job: FusedJob = ctx.job
    hidden, weight, teacher_hidden, teacher_weight, saved = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    teacher = None if teacher_hidden is None else Head(teacher_hidden, teacher_weight)
    loop = ChunkLoop(job.arguments, job.plan, job.columns, Head(hidden.detach(), weight), teacher)
    hidden_gradient = loop.new_hidden_gradient() if needs_hidden else None
    weight_gradient = None
    if needs_weight:
        weight_gradient = main_grad_of(ctx.head_parameter) if job.main_grad else loop.new_weight_gradient()
    slices = job.plan.slices
    for chunk in loop:
        part = slice(chunk.columns.start * slices, chunk.columns.stop * slices)
        scale = chunk.batch.weights * upstream
        chunk_gradient(job.kernel, chunk.logits, chunk.teacher_logits, chunk.batch, saved[:, part], scale)
        if hidden_gradient is not None:
            loop.put_hidden_gradient(chunk, hidden_gradient)
        if weight_gradient is not None:
            loop.add_weight_gradient(chunk, weight_gradient, first=not job.main_grad and chunk.columns.start == 0)
    if weight_gradient is not None:
        if job.main_grad:
            return hidden_gradient, wgrad_placeholder(ctx.head_parameter)
        weight_gradient = weight_gradient.to(weight.dtype)
    return hidden_gradient, weight_gradient
