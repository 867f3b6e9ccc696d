"""The eager row kernel of a full-vocabulary teacher whose logits are projected beside the student's.

n rows, V columns of this shard; z = y/T of the student, u of the teacher, p = softmax(u), q = softmax(z).
Forward KL Σ p(u − lse_u − z + lse_z), gradient q − p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.kernels import RowBatch, RowValues, label_rows
from megatron_kd.losses.logits import add_at_, finite_or_zero, log_of_sums, owned_columns, row_max, scale_, take


@dataclass
class FullWork:
    """A block between the halves: z and u, nothing overwritten but by the scaling."""

    z: Tensor
    u: Tensor
    slope: Tensor | None
    batch: RowBatch
    label: tuple[Tensor, Tensor, Tensor, Tensor] | None  # column, owned, z, weight of the cross-entropy
    packed: Tensor


class FullKernel:
    """Row kernel of ``linear_full_divergence``, forward KL; see kernels.py for the protocol."""

    def __init__(self, arguments: LossArguments, teacher_logit_softcap: float | None) -> None:
        self.arguments = arguments
        self.teacher_logit_softcap = teacher_logit_softcap
        self.own_ce_sum = arguments.mixes_ce and arguments.temperature != 1.0
        self.saved_rows = 2 + self.own_ce_sum

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch) -> FullWork:
        """Five floats a row go into the exchange (more with cross-entropy): both maxima and sums, z at argmax u."""
        work = self._scaled(logits, teacher_logits, batch)
        parts = [*_max_and_sum(work.z, 1.0), *_max_and_sum(work.u, 1.0), _at_teacher_best(work.z, work.u)]
        if work.label is not None:
            parts.append(work.label[2][:, 0])
        if self.own_ce_sum:
            parts.append(_max_and_sum(work.z, self.arguments.temperature)[1])
        work.packed = torch.stack(parts)
        return work

    def finish(self, work: FullWork, gathered: Tensor, scale: Tensor | None) -> RowValues:
        """See the protocol."""
        arguments = self.arguments
        z_max, z_sum, u_max, u_sum, z_best = gathered.unbind(dim=1)[:5]
        saved = [log_of_sums(z_max, z_sum), log_of_sums(u_max, u_sum)]
        if self.own_ce_sum:
            saved.append(log_of_sums(arguments.temperature * z_max, gathered[:, -1]))
        normalisers = torch.stack(saved)
        lse_z, lse_u = saved[0], saved[1]
        # The first rank with the largest teacher logit holds the teacher's best id.
        best = z_best.gather(0, u_max.argmax(dim=0, keepdim=True))[0]
        log_ratio = (work.u - work.z).add_((lse_z - lse_u)[:, None])
        p = work.u.sub_(lse_u[:, None]).exp_()
        kd = log_ratio.mul_(p).sum(dim=1)
        del log_ratio
        ce = torch.zeros_like(kd)
        if work.label is not None:
            label_z = arguments.temperature * gathered[:, 5].amax(dim=0)
            ce = torch.where(work.label[3] != 0, normalisers[-1 if self.own_ce_sum else 0] - label_z, 0.0)
        one = torch.ones_like(kd)
        top1 = (best >= z_max.amax(dim=0)).to(kd.dtype)
        figures = torch.stack([kd, torch.zeros_like(kd), ce, one, one, top1])
        if scale is not None:
            self._to_gradient(work, p, normalisers, scale)
        return RowValues(torch.where(work.batch.valid, figures, 0.0), normalisers)

    def gradient(
        self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch, saved: Tensor, scale: Tensor
    ) -> None:
        """See the protocol."""
        work = self._scaled(logits, teacher_logits, batch)
        self._to_gradient(work, work.u.sub_(saved[1][:, None]).exp_(), saved, scale)

    def _scaled(self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch) -> FullWork:
        assert teacher_logits is not None
        arguments = self.arguments
        slope = scale_(logits, arguments.temperature, arguments.logit_softcap)
        scale_(teacher_logits, arguments.temperature, self.teacher_logit_softcap)
        label = None
        if arguments.mixes_ce:
            ids, weight = label_rows(arguments, batch)
            column, here = owned_columns(ids, arguments.vocab_start, arguments.vocab_rows)
            label = (column, here, take(logits, column, here), weight)
        return FullWork(logits, teacher_logits, slope, batch, label, logits.new_empty(0))

    def _to_gradient(self, work: FullWork, p: Tensor, normalisers: Tensor, scale: Tensor) -> None:
        """z → scale·dL/dx in place, p = softmax(u) given."""
        arguments, z = self.arguments, work.z
        t = arguments.temperature
        kd_scale = scale * (arguments.kd_scale / t)
        q_scale, ce_part = kd_scale, None
        if work.label is not None:
            ce_scale = scale * work.label[3]
            if self.own_ce_sum:
                ce_part = (z * t).sub_(normalisers[2][:, None]).exp_().mul_(ce_scale[:, None])
            else:
                q_scale = kd_scale + ce_scale
        z.sub_(normalisers[0][:, None]).exp_().mul_(q_scale[:, None]).addcmul_(p, kd_scale[:, None], value=-1)
        if ce_part is not None:
            z.add_(ce_part)
        if work.label is not None:
            add_at_(z, work.label[0], torch.where(work.label[1], -ce_scale[:, None], 0.0))
        if work.slope is not None:
            z.mul_(work.slope)


def _max_and_sum(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(row maximum m [n], Σexp(t·(z − m)) [n])."""
    highest = row_max(logits)
    shifted = logits - finite_or_zero(highest)[:, None]
    if temperature != 1.0:
        shifted.mul_(temperature)
    return highest, shifted.exp_().sum(dim=1)


def _at_teacher_best(z: Tensor, u: Tensor) -> Tensor:
    """z [n] at this shard's largest u; −inf for an empty shard."""
    if u.shape[1] == 0:
        return z.new_full((z.shape[0],), -torch.inf)
    return z.gather(1, u.argmax(dim=1, keepdim=True))[:, 0]
