"""The divergences on a cached set and its tail: closed forms of value and gradient for one row.

S is the cached set of a row, p_k the teacher's probability of its id k, p_g that of everything outside; z are the
student's logits divided by the temperature. A divergence is a function of the student's z_k (k in S), lset =
logsumexp of z outside S and lse = logsumexp of all z. Its gradient outside S is therefore one number a row:
dL/dz_j = (∂L/∂lset)·exp(z_j − lset), which is why the large matrix needs no knowledge of the divergence.

A new divergence is one function and one entry of DIVERGENCES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's side of n rows after the treatment of the tail: p [n, K], 0 where unused, and tail [n]."""

    p: Tensor
    tail: Tensor


@dataclass(frozen=True)
class StudentRows:
    """The student's side of n rows.

    Attributes:
        z: [n, K], −inf where this rank does not own the id.
        owned: bool [n, K].
        lse: [n], over the vocabulary (over S where the student is renormalised over S).
        lset: [n], outside S; −inf where nothing lies outside.
    """

    z: Tensor
    owned: Tensor
    lse: Tensor
    lset: Tensor


@dataclass(frozen=True)
class RowResult:
    """Value and gradient of n rows.

    Attributes:
        set_loss: [n], the terms of the ids this rank owns: to be summed over the ranks.
        tail_loss: [n], the term of the tail, the same on every rank.
        dz: [n, K], 0 where not owned.
        dlset: [n], ∂L/∂lset through lse as well: the gradient of everything outside S.
    """

    set_loss: Tensor
    tail_loss: Tensor
    dz: Tensor
    dlset: Tensor


RowDivergence = Callable[[TeacherRows, StudentRows], RowResult]


def forward_kl(teacher: TeacherRows, student: StudentRows) -> RowResult:
    """Σ p_k(log p_k − z_k + lse) + p_g(log p_g − lset + lse); dz_k = (Σp + p_g)·q_k − p_k.

    The terms are formed as differences of log-probabilities (not as entropy minus cross-entropy), so that a student
    near its teacher loses no digits. A tail that the student's vocabulary does not have counts as 0.
    """
    p, z = teacher.p, student.z
    tail = torch.where(student.lset == -torch.inf, 0.0, teacher.tail)
    mass = p.sum(dim=1) + tail
    log_q = z - student.lse[:, None]
    log_q_tail = student.lset - student.lse
    # "Not equal to 0" rather than "> 0": NaN in a broken teacher row must show as a NaN loss.
    counted = student.owned & (p != 0)
    set_terms = p * (p.log() - log_q)
    tail_terms = tail * (tail.log() - log_q_tail)
    return RowResult(
        set_loss=torch.where(counted, set_terms, 0.0).sum(dim=1),
        tail_loss=torch.where(tail != 0, tail_terms, 0.0),
        dz=torch.where(student.owned, mass[:, None] * log_q.exp() - p, 0.0),
        dlset=mass * log_q_tail.exp() - tail,
    )


DIVERGENCES: dict[str, RowDivergence] = {"forward_kl": forward_kl}

# Those that exist against a full-vocabulary teacher (full_kernel.py and the dense reference write them out).
FULL_DIVERGENCES = ("forward_kl",)


def _bucket(p: Tensor, tail: Tensor) -> TeacherRows:
    return TeacherRows(p, tail)


def _renormalized(p: Tensor, tail: Tensor) -> TeacherRows:
    mass = p.sum(dim=1, keepdim=True)
    return TeacherRows(p / torch.where(mass == 0, 1.0, mass), torch.zeros_like(tail))


def _truncate(p: Tensor, tail: Tensor) -> TeacherRows:
    return TeacherRows(p, torch.zeros_like(tail))


@dataclass(frozen=True)
class Tail:
    """How what lies outside the cached ids is treated.

    Attributes:
        teacher: (p [n, K], p_g [n]) → the teacher's rows that the divergence sees.
        student_over_set: whether the student is renormalised over S too.
        divergences: the divergences it is defined for.
    """

    teacher: Callable[[Tensor, Tensor], TeacherRows]
    student_over_set: bool
    divergences: tuple[str, ...]


TAILS: dict[str, Tail] = {
    # One bucket for all ids outside S: an exact KL between two (K+1)-way distributions, a lower bound of the full KL.
    "bucket": Tail(_bucket, False, ("forward_kl",)),
    # The teacher renormalised over S against the student's full softmax.
    "renormalize_teacher": Tail(_renormalized, False, ("forward_kl",)),
    # Both renormalised over S: the student is free outside S.
    "renormalize_both": Tail(_renormalized, True, ("forward_kl",)),
    # The raw sum over S: it can be negative, and it is never clamped.
    "truncate": Tail(_truncate, False, ("forward_kl",)),
}


def check_divergence(divergence: str, tail: str | None, beta: float) -> None:
    """Raises ValueError, naming what there is, for an unknown divergence or tail or a combination not defined.

    A ``tail`` of None stands for a full-vocabulary teacher.
    """
    available = tuple(DIVERGENCES) if tail is not None else FULL_DIVERGENCES
    if divergence not in available:
        raise ValueError(f"divergence {divergence!r} is not available; available: {', '.join(available)}")
    if not 0 < beta < 1:
        raise ValueError(f"beta must lie strictly between 0 and 1, not {beta}")
    if tail is None:
        return
    if tail not in TAILS:
        raise ValueError(f"tail {tail!r} is not available; available: {', '.join(TAILS)}")
    if divergence not in TAILS[tail].divergences:
        raise ValueError(
            f"tail {tail!r} is not defined for divergence {divergence!r}, only for {', '.join(TAILS[tail].divergences)}"
        )
