"""The fused loss as a registered operator: how ``torch.compile`` and ``torch.export`` see it, one node of the graph.

Eager code does not pass through it, so that tools which look at every operator (FLOP counters, memory counters,
profilers) see the GEMMs inside. What depends on the numbers (the check of the ids, which rows are left out) happens
within the operator, where a tracer cannot trip over it.

N tokens, n of them on this rank, D hidden, Vl rows of the head's shard, K cached ids, S saved floats.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megatron_kd.losses.arguments import LossArguments, Settings, check_values
from megatron_kd.losses.autograd import Source, make_kernel, plan_job
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.collectives import TensorParallelGroup
from megatron_kd.losses.divergences import make_divergence
from megatron_kd.losses.fused import fused_forward, recompute_backward
from megatron_kd.losses.kernels import FIGURES
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.projection import compute_dtype
from megatron_kd.losses.rows import output
from megatron_kd.targets import TopKTargets


class Scalars(NamedTuple):
    """The arguments of the operator that are no tensors, in the order of its schema."""

    divergence: str
    beta: float
    tail: str | None
    temperature: float
    t2: float
    ce_weight: float
    vocab_size: int
    vocab_start: int
    logit_softcap: float | None
    teacher_logit_softcap: float | None
    group_name: str | None
    sequence_parallel: bool
    mode: str
    chunk_bytes: int | None
    wants_hidden: bool
    wants_weight: bool


class Call:
    """The operator's flat arguments as the rest of the package takes them.

    ``teacher`` is [ids, logprobs, tail_logmass], or [hidden, weight] where ``tail`` is None.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        token_weights: Tensor,
        labels: Tensor | None,
        teacher: list[Tensor],
        *scalars: Any,
    ) -> None:
        self.scalars = s = Scalars(*scalars)
        self.student = Head(hidden, weight)
        group = None if s.group_name is None else _resolve_process_group(cast(Any, s.group_name))
        self.arguments = LossArguments(
            token_weights=token_weights,
            labels=labels,
            ce_weight=s.ce_weight,
            temperature=s.temperature,
            t2=s.t2,
            vocab_size=s.vocab_size,
            vocab_start=s.vocab_start,
            vocab_rows=min(weight.shape[0], max(0, s.vocab_size - s.vocab_start)),
            logit_softcap=s.logit_softcap,
            tp=TensorParallelGroup(group),
            sequence_parallel=s.sequence_parallel,
            dtype=compute_dtype(hidden, weight),
            device=hidden.device,
        )
        divergence = make_divergence(s.divergence, s.beta)
        self.settings = Settings(divergence, s.tail, s.teacher_logit_softcap, s.mode, s.chunk_bytes, False)
        self.teacher = None if s.tail is not None else Head(*teacher)
        self.source: Source = self.teacher or TopKTargets(teacher[0], teacher[1], teacher[2], s.temperature)
        # Whether the gradients are formed in forward.
        self.forms_hidden = s.wants_hidden and s.mode != "recompute"
        self.forms_weight = s.wants_weight and s.mode != "recompute"

    def job(self) -> Any:
        """The plan of the computation."""
        return plan_job(self.student.hidden, self.student.weight, self.source, self.arguments, self.settings)

    def saved_rows(self) -> int:
        """S where backward needs it, else 0."""
        if self.scalars.mode != "recompute":
            return 0
        return make_kernel(self.source, self.arguments, self.settings).saved_rows

    def flat_hidden(self, wanted: bool) -> tuple[int, ...]:
        """The shape of dH, empty if it is not wanted."""
        hidden = self.student.hidden
        # Not Size.numel(), which makes a plain number of a symbolic one: each number of tokens would compile anew.
        return (math.prod(hidden.shape[:-1]), hidden.shape[-1]) if wanted else (0,)

    def shard(self, wanted: bool) -> tuple[int, ...]:
        """The shape of dW, empty if it is not wanted."""
        return tuple(self.student.weight.shape) if wanted else (0,)


_TENSORS = "Tensor hidden, Tensor weight, Tensor token_weights, Tensor? labels, Tensor[] teacher"
_ARGUMENTS = (
    f"{_TENSORS}, str divergence, float beta, str? tail, float temperature, float t2, float ce_weight, int vocab_size, "
    "int vocab_start, float? logit_softcap, float? teacher_logit_softcap, str? group_name, bool sequence_parallel, "
    "str mode, int? chunk_bytes, bool wants_hidden, bool wants_weight"
)


@torch.library.custom_op(
    "megatron_kd::linear_divergence",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, figures [6, N], saved [S, N], dH [n, D], dW [Vl, D] in the dtype of the arithmetic).

    Gradients are for an upstream of 1; what is not wanted, or formed in backward, is empty.
    """
    call = Call(*flat)
    check_values(call.arguments, None if isinstance(call.source, Head) else call.source)
    recompute = call.scalars.mode == "recompute"
    with torch.no_grad():
        result = fused_forward(
            call.job(), call.student, call.teacher, wants=(call.forms_hidden, call.forms_weight), save=recompute
        )
    # How many rows are computed depends on the weights, the shape of a result must not.
    saved = result.figures.new_zeros(call.saved_rows(), call.arguments.tokens)
    if result.saved is not None:
        saved[:, : result.saved.shape[1]] = result.saved
    gradients = result.gradients
    nothing = saved.new_empty(0)
    return (
        result.loss,
        result.figures,
        saved,
        call.student.hidden.new_empty(0) if gradients.hidden is None else gradients.hidden,
        nothing if gradients.weight is None else gradients.weight,
    )


@_forward.register_fake
def _forward_shapes(*flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(*flat)
    tokens = call.arguments.tokens
    hidden = call.student.hidden
    loss = torch.empty((), device=hidden.device, dtype=call.arguments.dtype)
    return (
        loss,
        loss.new_empty(FIGURES, tokens),
        loss.new_empty(call.saved_rows(), tokens),
        hidden.new_empty(call.flat_hidden(call.forms_hidden)),
        loss.new_empty(call.shard(call.forms_weight)),
    )


@torch.library.custom_op(
    "megatron_kd::linear_divergence_backward",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor saved, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _backward(upstream: Tensor, saved: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    """(dH [n, D], dW [Vl, D]) of ``recompute``; what is not wanted is empty."""
    call = Call(*flat)
    with torch.no_grad():
        gradients = recompute_backward(
            call.job(),
            call.student,
            call.teacher,
            saved,
            upstream,
            wants_hidden=call.scalars.wants_hidden,
            weight_into=None,
            wants_weight=call.scalars.wants_weight,
        )
    return (
        call.student.hidden.new_empty(0) if gradients.hidden is None else gradients.hidden,
        saved.new_empty(0) if gradients.weight is None else gradients.weight,
    )


@_backward.register_fake
def _backward_shapes(upstream: Tensor, saved: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    call = Call(*flat)
    return (
        call.student.hidden.new_empty(call.flat_hidden(call.scalars.wants_hidden)),
        saved.new_empty(call.shard(call.scalars.wants_weight)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, token_weights, labels, teacher, *scalars = inputs
    _, _, saved, hidden_gradient, weight_gradient = output
    ctx.scalars = Scalars(*scalars)
    ctx.has_labels, ctx.teacher_tensors = labels is not None, len(teacher)
    ctx.like_hidden, ctx.like_weight = (hidden.shape, hidden.dtype), (weight.shape, weight.dtype)
    if ctx.scalars.mode == "recompute":
        ctx.save_for_backward(saved, hidden, weight, token_weights, *([labels] if ctx.has_labels else []), *teacher)
    else:
        ctx.save_for_backward(hidden_gradient, weight_gradient)


def _gradients(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    """One gradient an argument of the operator; out of place, since a compiled graph may go backward twice."""
    if ctx.scalars.mode == "recompute":
        saved, hidden, weight, token_weights, *others = ctx.saved_tensors
        labels = others.pop(0) if ctx.has_labels else None
        dh, dw = _backward(upstream, saved, hidden, weight, token_weights, labels, others, *ctx.scalars)
    else:
        # The upstream, a scalar, keeps its precision: in 16 bits it would lose digits, and a loss scale its finiteness.
        dh, dw = (gradient * upstream for gradient in ctx.saved_tensors)
    (hidden_shape, hidden_dtype), (weight_shape, weight_dtype) = ctx.like_hidden, ctx.like_weight
    return (
        dh.view(hidden_shape).to(hidden_dtype) if ctx.scalars.wants_hidden else None,
        dw.view(weight_shape).to(weight_dtype) if ctx.scalars.wants_weight else None,
        None,
        None,
        [None] * ctx.teacher_tensors,
        *[None] * len(ctx.scalars),
    )


_forward.register_autograd(_gradients, setup_context=_keep)


def run_operator(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    """``run_fused`` through the operator; the values are checked within."""
    grad = torch.is_grad_enabled() and settings.mode != "no_grad"
    if isinstance(source, Head):
        teacher = [source.hidden, source.weight]
    else:
        teacher = [source.ids, source.logprobs, source.tail_logmass]
    scalars = Scalars(
        divergence=settings.divergence.name,
        beta=settings.divergence.beta,
        tail=settings.tail,
        temperature=arguments.temperature,
        t2=arguments.t2,
        ce_weight=arguments.ce_weight,
        vocab_size=arguments.vocab_size,
        vocab_start=arguments.vocab_start,
        logit_softcap=arguments.logit_softcap,
        teacher_logit_softcap=settings.teacher_logit_softcap,
        group_name=None if arguments.tp.group is None else arguments.tp.group.group_name,
        sequence_parallel=arguments.sequence_parallel,
        mode=settings.mode,
        chunk_bytes=settings.chunk_bytes,
        wants_hidden=grad and hidden.requires_grad,
        wants_weight=grad and weight.requires_grad,
    )
    loss, figures, *_ = _forward(hidden, weight, arguments.token_weights, arguments.labels, teacher, *scalars)
    return output(arguments, loss, figures.detach())
