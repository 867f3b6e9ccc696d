"""What every divergence returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DivergenceStatistics:
    """Detached figures per token, each [N] in the dtype of the loss, on every rank, 0 where the token weight is 0.

    Attributes:
        teacher_mass: probability the teacher gives to its cached ids (1 for a full-vocabulary teacher).
        student_mass: probability the student gives to those ids, in (0, 1 + ε].
        tail: the part of the divergence (in the units of the loss) that comes from outside the cached ids.
        top1_agreement: 1 where the teacher's most likely id has the student's largest logit (ties agree), else 0.
        kd_per_token: the divergence before mixing; None unless cross-entropy is mixed in.
        ce_per_token: the cross-entropy before mixing, 0 where the label is −100; None unless it is mixed in.
    """

    teacher_mass: Tensor
    student_mass: Tensor
    tail: Tensor
    top1_agreement: Tensor
    kd_per_token: Tensor | None = None
    ce_per_token: Tensor | None = None


@dataclass(frozen=True)
class DivergenceOutput:
    """The result of a divergence over N tokens; equal on all ranks of the tensor-parallel group.

    Attributes:
        loss: Σ_n w_n·l_n, a scalar and the only differentiable output. It is already global over the
            tensor-parallel group: never reduce it over that group again. float32 (float64 for float64 inputs).
        loss_per_token: l_n [N], unweighted and detached, 0 where w_n is 0.
        statistics: detached figures per token.
    """

    loss: Tensor
    loss_per_token: Tensor
    statistics: DivergenceStatistics
