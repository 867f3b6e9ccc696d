"""The divergences: value and gradient of one pair of probabilities, and what becomes of the tail.

A divergence is D = Σ_i d(p_i, q_i) over the outcomes i of teacher p and student q = softmax(z). With u_i =
q_i·∂d/∂q_i (up to terms that cancel) its gradient is dD/dz_i = u_i − q_i·E, E = Σ_i u_i. So one function of
(log p, log q) serves a cached id, the bucket of everything else and every entry of a full vocabulary alike, and the
only thing that ranks must share beyond the normalisers is the number E a row.

A new divergence is one function and one entry of DIVERGENCES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# KL(student ‖ teacher) is infinite where the teacher gives 0 and the student does not, as a cached teacher may. There,
# and wherever a cached log-probability is below it, this takes its place, in value and gradient. The log-probabilities
# of a full-vocabulary teacher are finite and taken as they are.
LOG_P_FLOOR = -100.0

# From so large a log(p/q) on, m is β·p to the last digit of any β that a float32 tells from 0; e^80 is finite in it.
JSD_LARGEST = 80.0

PairTerms = tuple[Tensor, Tensor]
"""(d, u), of the shape of the arguments."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> PairTerms:
    """KL(p ‖ q): d = p·(log p − log q), u = −p; 0 where p is 0."""
    p = log_p.exp()
    # "Not equal to 0" rather than "> 0": NaN in a teacher's row must show as a NaN loss.
    return torch.where(p != 0, p * (log_p - log_q), 0.0), -p


def reverse_kl(log_p: Tensor, log_q: Tensor) -> PairTerms:
    """KL(q ‖ p): d = u = q·(log q − log p); 0 where q is 0."""
    q = log_q.exp()
    d = torch.where(q != 0, q * (log_q - log_p), 0.0)
    return d, d


def jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> PairTerms:
    """β·KL(p ‖ m) + (1 − β)·KL(q ‖ m), m = β·p + (1 − β)·q; u = (1 − β)·q·log(q/m).

    log(q/m) = −log(1 + β·(e^r − 1)), r = log p − log q, by log1p, whose error is small where p is near q or β near 0.
    At a β near 1, where less than ¾ is left under the logarithm, the sum (1 − β) + β·e^r keeps the digits.
    """
    p, q = log_p.exp(), log_q.exp()
    neither = (p == 0) & (q == 0)
    r = torch.where(neither, 0.0, log_p - log_q)
    limited = r.clamp(max=JSD_LARGEST)
    growth = beta * torch.expm1(limited)
    log_m_q = torch.log1p(growth)
    if beta > 0.9:
        log_m_q = torch.where(growth > -0.25, log_m_q, ((1.0 - beta) + beta * limited.exp()).log())
    log_q_m = -torch.where(r > JSD_LARGEST, r + math.log(beta), log_m_q)
    log_p_m = torch.where(p != 0, r + log_q_m, 0.0)
    # r = ∞ (q = 0) gives ∞ − ∞ above; there log(p/m) = −log β.
    log_p_m = torch.where(r == torch.inf, -math.log(beta), log_p_m)
    u = (1.0 - beta) * torch.where(q != 0, q * log_q_m, 0.0)
    return beta * p * log_p_m + u, u


def tvd(log_p: Tensor, log_q: Tensor) -> PairTerms:
    """Total variation ½·Σ|q − p|; u = ½·q·sign(q − p), 0 where they are equal."""
    q = log_q.exp()
    difference = q - log_p.exp()
    return 0.5 * difference.abs(), 0.5 * q * difference.sign()


@dataclass(frozen=True)
class Divergence:
    """A divergence as the row kernels use it.

    Attributes:
        terms: (log p, log q) → (d, u).
        expectation: where E comes from when the vocabulary is spread over ranks: ``known`` (Σu = −Σp, which every
            rank has), ``linear`` (u is linear in the normaliser's logarithm, so E is a sum that fits in the one
            exchange of the normalisers) or ``exchanged`` (it needs the normaliser first: a second exchange).
        name: its key in ``DIVERGENCES``, by which fused row kernels choose their formula.
        beta: of the generalised divergences.
    """

    terms: Callable[[Tensor, Tensor], PairTerms]
    expectation: str
    name: str
    beta: float

    def cached_log_p(self, p: Tensor) -> Tensor:
        """log p of cached probabilities, −inf for 0; for reverse KL not below ``LOG_P_FLOOR``."""
        return p.log().clamp(min=LOG_P_FLOOR) if self.name == "reverse_kl" else p.log()


# Name → (terms, where the expectation comes from).
DIVERGENCES: dict[str, tuple[Callable[..., PairTerms], str]] = {
    "forward_kl": (forward_kl, "known"),
    "reverse_kl": (reverse_kl, "linear"),
    "jsd": (jsd, "exchanged"),
    "tvd": (tvd, "exchanged"),
}


def make_divergence(name: str, beta: float) -> Divergence:
    """The divergence of that name; ``beta`` is used by jsd alone."""
    terms, expectation = DIVERGENCES[name]
    return Divergence(partial(terms, beta=beta) if name == "jsd" else terms, expectation, name, beta)


TeacherRows = tuple[Tensor, Tensor]
"""(p [n, K], 0 where unused; p of the tail [n])."""


def _bucket(p: Tensor, tail: Tensor) -> TeacherRows:
    return p, tail


def _renormalized(p: Tensor, tail: Tensor) -> TeacherRows:
    mass = p.sum(dim=1, keepdim=True)
    return p / torch.where(mass == 0, 1.0, mass), torch.zeros_like(tail)


def _truncate(p: Tensor, tail: Tensor) -> TeacherRows:
    return p, torch.zeros_like(tail)


@dataclass(frozen=True)
class Tail:
    """How what lies outside the cached ids is treated.

    Attributes:
        teacher: (p [n, K], p of the tail [n]) → the teacher's rows that the divergence sees.
        student_over_set: whether the student is renormalised over the cached ids too.
        divergences: the divergences it is defined for.
        why: the reason that it is not defined for others.
    """

    teacher: Callable[[Tensor, Tensor], TeacherRows]
    student_over_set: bool
    divergences: tuple[str, ...]
    why: str = ""


TAILS: dict[str, Tail] = {
    # One outcome for all ids outside S: an exact divergence between two (K+1)-way distributions, never above the full.
    "bucket": Tail(_bucket, False, tuple(DIVERGENCES)),
    # The teacher renormalised over S against the student's full softmax.
    "renormalize_teacher": Tail(
        _renormalized,
        False,
        ("forward_kl", "jsd", "tvd"),
        "the teacher has no mass outside its cached tokens, the student has, and KL(student ‖ teacher) is infinite",
    ),
    # Both renormalised over S: the student is free outside S.
    "renormalize_both": Tail(_renormalized, True, tuple(DIVERGENCES)),
    # The raw sum over S: it can be negative, and it is never clamped.
    "truncate": Tail(
        _truncate,
        False,
        ("forward_kl",),
        "the truncated rows are no distributions, and only the forward KL's sum over the cached tokens means something",
    ),
}


def check_divergence(divergence: str, tail: str | None, beta: float) -> None:
    """Raises ValueError, naming what there is, for an unknown divergence or tail or a combination not defined.

    A ``tail`` of None stands for a full-vocabulary teacher.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence {divergence!r} is not available; available: {', '.join(DIVERGENCES)}")
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must lie strictly between 0 and 1, not {beta}: the limits of jsd are 0, not the forward and "
            "reverse KL; ask for those by divergence"
        )
    if tail is None:
        return
    if tail not in TAILS:
        raise ValueError(f"tail {tail!r} is not available; available: {', '.join(TAILS)}")
    if divergence not in TAILS[tail].divergences:
        raise ValueError(
            f"tail {tail!r} is not defined for divergence {divergence!r}, only for "
            f"{', '.join(TAILS[tail].divergences)}: {TAILS[tail].why}"
        )
