"""How far stored top-K targets are from the dense distribution they stand for: the mathematics of a few rows.

c rows, V vocabulary, Vl columns of it on this rank, K kept ids; p the teacher's dense distribution, q the student's,
both at the temperature of the targets, S the kept ids, p_g and q_g what lies outside them. All in float64.

For a set S, six sums over the vocabulary outside it say all that a storage form can do there, so that any number of K,
value dtypes and tails costs one pass over [c, V].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.cache.values import from_patterns, to_patterns
from megatron_kd.losses.collectives import TensorParallelGroup
from megatron_kd.losses.divergences import TAILS, forward_kl
from megatron_kd.losses.logits import add_at_, owned_columns, take
from megatron_kd.losses.projection import Projection
from megatron_kd.losses.reference_math import log_sum_exp

SUBTRACTED = "bucket_by_subtraction"
FORMS = {
    "bucket": TAILS["bucket"],
    SUBTRACTED: TAILS["bucket"],
    "truncate": TAILS["truncate"],
    "renormalize_teacher": TAILS["renormalize_teacher"],
    "renormalize_both": TAILS["renormalize_both"],
}
"""The tails of the losses, and the bucket whose mass is 1 − Σ of the stored values rather than stored."""


def dense_log_probs(
    hidden: Tensor, head: Tensor, temperature: float, tp: TensorParallelGroup, softened: float = 1.0
) -> Tensor:
    """Float64 log softmax(hidden·headᵀ / (temperature·softened)) [c, Vl], normalised over the shards of all ranks.

    Args:
        hidden: [c, D], the same on every rank.
        head: [Vl, D], this rank's rows without padding.
    """
    logits = hidden.new_empty((hidden.shape[0], head.shape[0]), dtype=torch.float64)
    Projection(head, slice(0, head.shape[0]), torch.float64).logits(hidden.double(), out=logits)
    logits /= temperature * softened
    return logits.sub_(log_sum_exp(logits, tp)[:, None])


@dataclass(frozen=True)
class Outside:
    """Sums over the vocabulary outside S, each [c]: of p, q, p², pq, q² and p·log(p/q)."""

    p: Tensor
    q: Tensor
    pp: Tensor
    pq: Tensor
    qq: Tensor
    kl: Tensor


@dataclass(frozen=True)
class KeptRows:
    """The dense distributions seen from ids S: log p and log q there [c, K], −inf where unused, and what is outside."""

    log_p: Tensor
    log_q: Tensor
    outside: Outside


class DenseRows:
    """Teacher and student over the whole vocabulary, c rows of it, columns spread over the ranks of ``tp``."""

    def __init__(self, log_p: Tensor, log_q: Tensor, vocab_start: int, tp: TensorParallelGroup) -> None:
        """log_p and log_q: float64 [c, Vl] from ``dense_log_probs``. Collective, as all methods are."""
        self._log_p, self._log_q, self._start, self._tp = log_p, log_q, vocab_start, tp
        squares = (log_q.exp() - log_p.exp()).square().sum(dim=1)
        divergence = forward_kl(log_p, log_q)[0].sum(dim=1)
        self.gradient_norm2, self.kl = tp.sum_(torch.stack([squares, divergence]))
        """‖q − p‖² and KL(p ‖ q) [c]: the gradient of the dense loss by the student's logits z/T, and its value."""

    def keep(self, ids: Tensor) -> KeptRows:
        """The distributions seen from ids [c, K]."""
        columns, owned = owned_columns(ids, self._start, self._log_p.shape[1])
        log_p, log_q = (self._tp.max(take(values, columns, owned)) for values in (self._log_p, self._log_q))
        masked = []
        for values in (self._log_p, self._log_q):
            masked.append(values.clone())
            add_at_(masked[-1], columns, torch.where(owned, -torch.inf, 0.0))
        return KeptRows(log_p, log_q, Outside(*self._tp.sum_(_sums(*masked))))


def first_k(rows: KeptRows, top_k: int) -> KeptRows:
    """The same rows seen from their first ``top_k`` ids; what follows them is added to the outside."""
    log_p, log_q = rows.log_p[:, top_k:], rows.log_q[:, top_k:]
    known = rows.outside
    parts = (known.p, known.q, known.pp, known.pq, known.qq, known.kl)
    sums = torch.stack(parts) + _sums(log_p, log_q)
    return KeptRows(rows.log_p[:, :top_k], rows.log_q[:, :top_k], Outside(*sums))


def _sums(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The fields of ``Outside`` [6, c], one matrix after the other."""
    divergence = forward_kl(log_p, log_q)[0].sum(dim=1)
    p, q = log_p.exp(), log_q.exp()
    sums = p.sum(dim=1), q.sum(dim=1), (p * p).sum(dim=1), (p * q).sum(dim=1), (q * q).sum(dim=1)
    return torch.stack([*sums, divergence])


def rounded(log_p: Tensor, value_dtype: str) -> Tensor:
    """Log-probabilities as the cache gives them back after storing them as ``value_dtype``; float64, same shape."""
    values = log_p.to(torch.float32).clamp(max=0.0).cpu().numpy()
    back = from_patterns(to_patterns(values, value_dtype), value_dtype)
    return torch.from_numpy(back.astype("f8")).to(log_p.device)


def stored_tail(rows: KeptRows, log_r: Tensor, form: str) -> Tensor:
    """The log of the tail's mass [c] that goes with the stored log-probabilities ``log_r`` in one of ``FORMS``."""
    if form == SUBTRACTED:
        # In float64, which is kind to it: what is lost here is lost by the rounding of the values alone.
        return (1.0 - log_r.exp().sum(dim=1)).clamp(min=0.0).log()
    return rows.outside.p.log().to(torch.float32).double()


@dataclass(frozen=True)
class Loss:
    """What a storage form loses, per row [c].

    Attributes:
        kl: KL(p ‖ stored), the stored values taken for a distribution: outside S the stored tail, spread as the student
            spreads its own. ∞ where the form has no mass for something the teacher has mass for. For values that miss
            the sum of 1 by their rounding it is the generalised divergence Σ p·log(p/s) − p + s ≥ 0.
        loss: the forward KL's loss on the stored targets against the student; the dense one is ``DenseRows.kl``.
        gradient_error2: ‖dz_stored − dz‖², z the student's logits over T.
        rounding_error2: ‖dz_stored − dz_exact‖², dz_exact that of the same K and tail with exact values and tail mass.
    """

    kl: Tensor
    loss: Tensor
    gradient_error2: Tensor
    rounding_error2: Tensor


@dataclass(frozen=True)
class _Gradient:
    """dz_stored − dz as what it is made of: on_set·q − (r − p) on S, p − off_set·q outside; r [c, K], the rest [c]."""

    r: Tensor
    on_set: Tensor
    off_set: Tensor


def _gradient(q: Tensor, r: Tensor, t: Tensor, outside_q: Tensor, student_over_set: bool) -> _Gradient:
    if student_over_set:
        q_set = q.sum(dim=1)
        return _Gradient(r, 1.0 / q_set - 1.0, torch.ones_like(q_set))
    on_set = r.sum(dim=1) + t - 1.0
    return _Gradient(r, on_set, torch.where(outside_q == 0, 0.0, t / outside_q) - on_set)


def compare(rows: KeptRows, log_r: Tensor, log_tail: Tensor, form: str) -> Loss:
    """Stored values log_r [c, K] and tail log_tail [c] against the dense distributions.

    The loss's own gradient (docs/losses.md) is (r + t)·q_j − r_j on S and (r + t)·q_j − t·q_j/q_g outside, r the
    stored probabilities and their sum, t the tail, both after the tail's rule; with the student renormalised over S
    it is q_j/q_S − r_j on S and 0 outside. The dense one is q − p.
    """
    rule, outside = FORMS[form], rows.outside
    p, q = rows.log_p.exp(), rows.log_q.exp()
    r, t = rule.teacher(log_r.exp(), log_tail.exp())
    t = torch.where(outside.q == 0, 0.0, t)  # as the losses do: a tail that the student does not have counts as 0
    if rule.student_over_set:
        loss = forward_kl(r.log(), rows.log_q - q.sum(dim=1).log()[:, None])[0].sum(dim=1)
    else:
        loss = forward_kl(r.log(), rows.log_q)[0].sum(dim=1) + forward_kl(t.log(), outside.q.log())[0]
    stored = _gradient(q, r, t, outside.q, rule.student_over_set)
    exact = _gradient(q, *rule.teacher(p, outside.p), outside.q, rule.student_over_set)
    error2 = (stored.on_set[:, None] * q + p - r).square().sum(dim=1)
    off = stored.off_set
    error2 = error2 + (outside.pp - 2.0 * off * outside.pq + off.square() * outside.qq).clamp(min=0.0)
    rounding2 = ((stored.on_set - exact.on_set)[:, None] * q - (r - exact.r)).square().sum(dim=1)
    rounding2 = rounding2 + (off - exact.off_set).square() * outside.qq
    within = outside.kl - forward_kl(outside.p.log(), outside.q.log())[0]
    kl = _excess(rows.log_p, r.log()).sum(dim=1) + _excess(outside.p.log(), t.log()) + within.clamp(min=0.0)
    return Loss(kl, loss, error2, rounding2)


def _excess(log_p: Tensor, log_r: Tensor) -> Tensor:
    """p·log(p/r) − p + r of every entry, never negative; expm1 keeps the digits where r is almost p."""
    p, r, x = log_p.exp(), log_r.exp(), log_p - log_r
    both = torch.where(r == 0, torch.inf, p * (torch.expm1(-x) + x))
    return torch.where(p == 0, r, both)
