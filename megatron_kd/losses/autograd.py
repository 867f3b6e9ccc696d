"""The fused loss as one differentiable function of hidden states and head.

In a single pass the gradients are formed in forward, for an upstream of 1, and backward scales them. In ``recompute``
backward forms them from fresh logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_kd.losses.arguments import LossArguments, Settings
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.full_kernel import FullKernel
from megatron_kd.losses.fused import FusedJob, fused_forward, recompute_backward, versioned
from megatron_kd.losses.geometry import plan_geometry, plan_rows
from megatron_kd.losses.kernels import RowKernel
from megatron_kd.losses.main_grad import accumulate_main_grad, check_main_grad, main_grad_of, wgrad_placeholder
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.rows import output
from megatron_kd.losses.sizes import logit_bytes
from megatron_kd.losses.topk_kernel import TopKKernel
from megatron_kd.targets import TopKTargets

Source = TopKTargets | Head
"""Where the teacher's distribution comes from: cached targets, or hidden states and a head."""


def make_kernel(source: Source, arguments: LossArguments, settings: Settings) -> RowKernel[Any, Any]:
    """The row kernel for a source."""
    if isinstance(source, TopKTargets):
        assert settings.tail is not None
        return TopKKernel(arguments, source, settings.divergence, settings.tail)
    return FullKernel(arguments, settings.divergence, settings.teacher_logit_softcap, source.hidden.device)


def bytes_per_logit(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, *, keeps_slope: bool, overlaps: bool
) -> float:
    """Bytes of all chunk buffers for one logit: the student's, the teacher's and the slope of a soft-cap, all of them
    twice where an exchange overlaps the next chunk, and on a GPU the 16-bit copy of dz for the gradient GEMMs."""
    slope = arguments.logit_softcap is not None and keeps_slope
    return logit_bytes(
        teacher=isinstance(source, Head),
        slope=slope,
        overlaps=overlaps,
        itemsize=arguments.dtype.itemsize,
        copies_narrow=hidden.device.type != "cpu" and hidden.dtype == weight.dtype and hidden.dtype.itemsize == 2,
    )


def plan_job(hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings) -> FusedJob:
    """Which rows are computed, by which kernel, cut how.

    The shard is taken as ⌈vocabulary/tp⌉ rows, so that ranks with uneven shards cut alike.
    """
    kernel = make_kernel(source, arguments, settings)
    plan = plan_rows(arguments.token_weights, arguments.tp.size if arguments.sequence_parallel else 1, hidden.device)
    geometry = plan_geometry(
        plan,
        -(-arguments.vocab_size // arguments.tp.size),
        bytes_per_logit(
            hidden,
            weight,
            source,
            arguments,
            keeps_slope=kernel.passes.keeps_slope,
            # A second buffer lets an exchange run beside the next GEMM.
            overlaps=arguments.tp.size > 1,
        ),
        settings.chunk_bytes,
        hidden.device,
        tiles=kernel.tileable and settings.mode in ("recompute", "no_grad"),
    )
    return FusedJob(arguments, kernel, plan, geometry)


def run_fused(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    """A fused loss from checked arguments in a resolved mode."""
    main_grad = settings.main_grad_accumulation and weight.requires_grad and settings.mode != "no_grad"
    if main_grad:
        check_main_grad(weight)
    job = plan_job(hidden, weight, source, arguments, settings)
    teacher = source if isinstance(source, Head) else None
    if settings.mode == "no_grad":
        with torch.no_grad():
            result = fused_forward(job, Head(hidden, weight), teacher, wants=(False, False), save=False)
        return output(arguments, result.loss, result.figures)
    tensors = (None, None) if teacher is None else (teacher.hidden, teacher.weight)
    loss, figures = _FusedLoss.apply(hidden, weight, *tensors, job, settings.mode == "recompute", main_grad)
    return output(arguments, loss, figures)


class _FusedLoss(torch.autograd.Function):
    """(hidden, weight) → (loss, figures)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor | None,
        teacher_weight: Tensor | None,
        job: FusedJob,
        recompute: bool,
        main_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        teacher = None
        if teacher_hidden is not None and teacher_weight is not None:
            teacher = Head(teacher_hidden, teacher_weight)
        student = Head(hidden.detach(), weight)
        ctx.job, ctx.recompute, ctx.main_grad, ctx.head_parameter = job, recompute, main_grad, weight
        ctx.hidden_shape, ctx.gradients = hidden.shape, None
        if recompute:
            result = fused_forward(job, student, teacher, wants=(False, False), save=True)
            # The targets and weights too: backward reads them again, and autograd refuses what was changed meanwhile.
            ctx.teacher = teacher
            watched = () if teacher is None else versioned(teacher.hidden, teacher.weight)
            ctx.save_for_backward(hidden, weight, result.saved, *watched, *job.reads_again())
        else:
            wants = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            result = fused_forward(job, student, teacher, wants=wants, save=False)
            ctx.gradients = result.gradients
        ctx.mark_non_differentiable(result.figures)
        return result.loss, result.figures

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, refuse_second_order(upstream))


def refuse_second_order(upstream: Tensor) -> Tensor:
    """The upstream of a ``once_differentiable`` backward pass, which under ``create_graph`` has to look trainable.

    torch refuses to differentiate the gradient again only where its upstream requires a gradient. The 1 of a loss does
    not, and a gradient penalty would silently see a constant.
    """
    return upstream.detach().requires_grad_() if torch.is_grad_enabled() else upstream


@once_differentiable
def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    with torch.autocast(upstream.device.type, enabled=False):
        hidden, weight = _recompute(ctx, upstream) if ctx.recompute else _scale(ctx, upstream)
    return None if hidden is None else hidden.view(ctx.hidden_shape), weight, None, None, None, None, None


def _scale(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the single pass, scaled in place: a second copy of dH would cost what dense hidden states do."""
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradient of a single-pass loss can be taken once: it was formed in forward and has been handed out; "
            "use mode='recompute' to go backward twice"
        )
    hidden, weight = ctx.gradients.hidden, ctx.gradients.weight
    ctx.gradients = None
    if hidden is not None:
        hidden.mul_(upstream)
    if weight is not None:
        if ctx.main_grad:
            accumulate_main_grad(ctx.head_parameter, weight, upstream)
            return hidden, wgrad_placeholder(ctx.head_parameter)
        weight = weight.mul_(upstream).to(ctx.head_parameter.dtype)
    return hidden, weight


def _recompute(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    job: FusedJob = ctx.job
    hidden, weight, saved, *_ = ctx.saved_tensors
    gradients = recompute_backward(
        job,
        Head(hidden.detach(), weight),
        ctx.teacher,
        saved,
        upstream,
        wants_hidden=ctx.needs_input_grad[0],
        weight_into=main_grad_of(ctx.head_parameter) if ctx.main_grad else None,
        wants_weight=ctx.needs_input_grad[1],
    )
    if gradients.weight is None:
        return gradients.hidden, None
    if ctx.main_grad:
        return gradients.hidden, wgrad_placeholder(ctx.head_parameter)
    return gradients.hidden, gradients.weight.to(weight.dtype)
