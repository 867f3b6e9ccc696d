"""The dense reference: [N, V] float32 logits and autograd through all of it. The oracle of the other two.

N tokens, D hidden, V vocabulary rows of this rank, K cached ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments, Settings
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.collectives import differentiable_sum, enter_sharded
from megatron_kd.losses.divergences import TAILS
from megatron_kd.losses.logits import row_max
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.reference_math import at_ids, cross_entropy, divergence_terms, log_sum_exp, outside_ids, project
from megatron_kd.losses.rows import output
from megatron_kd.losses.target_rows import target_rows
from megatron_kd.targets import TopKTargets


def run_dense_topk(
    hidden: Tensor, weight: Tensor, targets: TopKTargets, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    """A divergence on cached targets, from checked arguments.

    Collectives: hidden states enter with identity or all_gather (backward all_reduce or reduce_scatter); three
    logsumexp's maxima and sums and the [N, K] logits of the cached ids are all-reduced (backward: none).
    """
    assert settings.tail is not None
    tail, divergence = TAILS[settings.tail], settings.divergence
    y, weights, valid = _logits(hidden, weight, arguments)
    z = y / arguments.temperature
    rows = target_rows(targets, slice(None), valid, arguments.dtype)
    used = rows.ids >= 0
    z_set = at_ids(z, rows.ids, arguments)
    lse = log_sum_exp(z, arguments.tp)
    lset = log_sum_exp(outside_ids(z, rows.ids, arguments), arguments.tp)
    # A row without ids must not meet −inf − (−inf): a large negative number stands for −inf.
    lse_set = torch.logsumexp(z_set.masked_fill(~used, torch.finfo(torch.float32).min / 2), dim=1)

    p, p_tail = tail.teacher(rows.p, rows.tail)
    normaliser = lse_set if tail.student_over_set else lse
    log_q = torch.where(used, z_set - normaliser[:, None], -torch.inf)
    on_set = divergence_terms(divergence, divergence.cached_log_p(p), log_q).sum(dim=1)
    outside = torch.zeros_like(on_set)
    if not tail.student_over_set:
        # A tail that the student's vocabulary does not have counts as 0.
        p_tail = torch.where(lset == -torch.inf, 0.0, p_tail)
        outside = divergence_terms(divergence, divergence.cached_log_p(p_tail), lset - lse)

    z_best = z_set.detach().gather(1, rows.best)[:, 0]
    top1 = (rows.ids.gather(1, rows.best)[:, 0] >= 0) & (z_best >= _highest(z, arguments))
    student_mass = ((z_set - lse[:, None]).exp() * used).sum(dim=1)
    return _finish(arguments, y, weights, valid, on_set, outside, rows.p.sum(dim=1), student_mass, top1)


def run_dense_full(
    hidden: Tensor, weight: Tensor, teacher: Head, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    """A divergence against the teacher's whole distribution, from checked arguments."""
    y, weights, valid = _logits(hidden, weight, arguments)
    tp = arguments.tp
    with torch.no_grad():
        teacher_rows = _gathered(teacher.hidden, arguments)
        u = project(teacher_rows, teacher.weight, arguments, settings.teacher_logit_softcap) / arguments.temperature
        log_p = u - log_sum_exp(u, tp)[:, None]
    z = y / arguments.temperature
    # The normaliser is replicated, the terms are sharded: its gradient is the sum over the shards.
    lse = enter_sharded(log_sum_exp(z, tp), tp, sequence_parallel=False)
    terms = divergence_terms(settings.divergence, log_p, z - lse[:, None])
    on_set = differentiable_sum(terms.sum(dim=1), tp)
    one = torch.ones_like(on_set)
    top1 = _same_best(z.detach(), u, arguments)
    return _finish(arguments, y, weights, valid, on_set, torch.zeros_like(on_set), one, one, top1)


def _logits(hidden: Tensor, weight: Tensor, arguments: LossArguments) -> tuple[Tensor, Tensor, Tensor]:
    y = project(_gathered(hidden, arguments), weight, arguments, arguments.logit_softcap)
    weights = arguments.device_weights
    return y, weights, weights != 0


def _gathered(hidden: Tensor, arguments: LossArguments) -> Tensor:
    return enter_sharded(hidden.reshape(-1, hidden.shape[-1]), arguments.tp, arguments.sequence_parallel)


def _highest(z: Tensor, arguments: LossArguments) -> Tensor:
    return arguments.tp.max(row_max(z.detach()))


def _same_best(z: Tensor, u: Tensor, arguments: LossArguments) -> Tensor:
    """Whether the student's logit at the teacher's best id is its largest, bool [N]."""
    tp = arguments.tp
    at_best = z.new_full(z.shape[:1], -torch.inf)
    if z.shape[1]:
        at_best = z.gather(1, u.argmax(dim=1, keepdim=True))[:, 0]
    best = tp.stack(at_best).gather(0, tp.stack(row_max(u)).argmax(dim=0, keepdim=True))[0]
    return best >= _highest(z, arguments)


def _finish(
    arguments: LossArguments,
    y: Tensor,
    weights: Tensor,
    valid: Tensor,
    on_set: Tensor,
    outside: Tensor,
    teacher_mass: Tensor,
    student_mass: Tensor,
    top1: Tensor,
) -> DivergenceOutput:
    kd = on_set + outside
    loss_per_token = arguments.kd_scale * kd
    ce = torch.zeros_like(kd)
    if arguments.device_labels is not None:
        ce = cross_entropy(y, arguments.device_labels, valid, arguments)
        loss_per_token = loss_per_token + arguments.ce_weight * ce
    loss = torch.where(valid, weights * loss_per_token, 0.0).sum()
    figures = torch.stack([on_set, outside, ce, teacher_mass, student_mass, top1.to(kd.dtype)]).detach()
    return output(arguments, loss, torch.where(valid, figures, 0.0))
