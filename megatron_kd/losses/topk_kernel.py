"""The eager row kernel of cached top-K targets.

n rows, V columns of this shard, K cached ids (S), z = y/T the scaled logits. The large matrix is passed over six
times: −inf is put at S, maximum, subtract, exp, sum; then one multiplication by a number a row, and the K values of S
are put back. So the logsumexp outside S is a *masked* one whose maximum is its own: no 1 − Σq, which loses every digit
once S holds nearly all the mass. Everything on S is done in [n, K].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.divergences import DIVERGENCES, TAILS, RowResult, StudentRows
from megatron_kd.losses.kernels import RowBatch, RowValues, label_rows
from megatron_kd.losses.logits import (
    add_at_,
    finite_or_zero,
    log_of_sums,
    owned_columns,
    row_max,
    scale_,
    take,
)
from megatron_kd.losses.target_rows import TargetRows, target_rows
from megatron_kd.targets import TopKTargets


@dataclass
class TopKWork:
    """A block between the halves: ``logits`` hold exp(z − shift) outside S and 0 on S."""

    logits: Tensor
    slope: Tensor | None
    batch: RowBatch
    targets: TargetRows
    columns: Tensor
    owned: Tensor
    z: Tensor
    label: tuple[Tensor, Tensor, Tensor, Tensor] | None  # column, owned, z, weight of the cross-entropy
    shift: Tensor
    packed: Tensor


class TopKKernel:
    """Row kernel of ``linear_topk_divergence``; see kernels.py for the protocol."""

    def __init__(self, arguments: LossArguments, targets: TopKTargets, divergence: str, tail: str) -> None:
        self.arguments = arguments
        self.targets = targets
        self.divergence = DIVERGENCES[divergence]
        self.tail = TAILS[tail]
        # The cross-entropy is at T = 1: at another temperature it has a normaliser of its own.
        self.own_ce_sum = arguments.mixes_ce and arguments.temperature != 1.0
        self.saved_rows = 2 + self.tail.student_over_set + self.own_ce_sum

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch) -> TopKWork:
        """Six or seven floats a row go into the exchange: two maxima with their sums, z at the teacher's best id, …"""
        work = self._masked(logits, batch)
        work.shift = row_max(logits)
        logits.sub_(finite_or_zero(work.shift)[:, None]).exp_()
        set_max = work.z.amax(dim=1)
        set_sum = (work.z - finite_or_zero(set_max)[:, None]).exp().sum(dim=1)
        parts = [work.shift, logits.sum(dim=1), set_max, set_sum, work.z.gather(1, work.targets.best)[:, 0]]
        if work.label is not None:
            parts.append(work.label[2][:, 0])
        if self.own_ce_sum:
            t = self.arguments.temperature
            parts.append(logits.pow(t).sum(dim=1))
            parts.append((t * (work.z - finite_or_zero(set_max)[:, None])).exp().sum(dim=1))
        work.packed = torch.stack(parts)
        return work

    def finish(self, work: TopKWork, gathered: Tensor, scale: Tensor | None) -> RowValues:
        """See the protocol."""
        arguments, valid = self.arguments, work.batch.valid
        shift, tail_sum, set_max, set_sum, best = gathered.unbind(dim=1)[:5]
        lset = log_of_sums(shift, tail_sum)
        lse_set = log_of_sums(set_max, set_sum)
        lse = torch.logaddexp(lse_set, lset)
        saved = [lse, lset]
        if self.tail.student_over_set:
            saved.append(lse_set)
        if self.own_ce_sum:
            t = arguments.temperature
            saved.append(
                torch.logaddexp(log_of_sums(t * shift, gathered[:, -2]), log_of_sums(t * set_max, gathered[:, -1]))
            )
        normalisers = torch.stack(saved)
        result = self._divergence(work, normalisers)
        highest = torch.maximum(shift.amax(dim=0), set_max.amax(dim=0))
        ce = torch.zeros_like(lse)
        if work.label is not None:
            label_z = arguments.temperature * gathered[:, 5].amax(dim=0)
            ce = torch.where(work.label[3] != 0, self._ce_normaliser(normalisers) - label_z, 0.0)
        figures = torch.stack(
            [
                result.set_loss,
                result.tail_loss,
                ce,
                work.targets.p.sum(dim=1),
                (lse_set - lse).exp(),
                (best.amax(dim=0) >= highest).to(lse.dtype),
            ]
        )
        if scale is not None:
            self._to_gradient(work, normalisers, result, scale)
        return RowValues(torch.where(valid, figures, 0.0), normalisers)

    def gradient(
        self, logits: Tensor, teacher_logits: Tensor | None, batch: RowBatch, saved: Tensor, scale: Tensor
    ) -> None:
        """See the protocol: lset takes the place of the local maximum, so neither maximum nor sum is needed."""
        work = self._masked(logits, batch)
        work.shift = saved[1]
        logits.sub_(finite_or_zero(work.shift)[:, None]).exp_()
        self._to_gradient(work, saved, self._divergence(work, saved), scale)

    def _masked(self, logits: Tensor, batch: RowBatch) -> TopKWork:
        arguments = self.arguments
        slope = scale_(logits, arguments.temperature, arguments.logit_softcap)
        targets = target_rows(self.targets, batch.rows, batch.valid, arguments.dtype)
        columns, owned = owned_columns(targets.ids, arguments.vocab_start, arguments.vocab_rows)
        z = take(logits, columns, owned)
        label = None
        if arguments.mixes_ce:
            ids, weight = label_rows(arguments, batch)
            column, here = owned_columns(ids, arguments.vocab_start, arguments.vocab_rows)
            label = (column, here, take(logits, column, here), weight)
        add_at_(logits, columns, torch.where(owned, -torch.inf, 0.0))
        nothing = logits.new_empty(0)
        return TopKWork(logits, slope, batch, targets, columns, owned, z, label, nothing, nothing)

    def _ce_normaliser(self, normalisers: Tensor) -> Tensor:
        return normalisers[-1] if self.own_ce_sum else normalisers[0]

    def _divergence(self, work: TopKWork, normalisers: Tensor) -> RowResult:
        lse, lset = normalisers[0], normalisers[1]
        if self.tail.student_over_set:
            lse, lset = normalisers[2], torch.full_like(lset, -torch.inf)
        teacher = self.tail.teacher(work.targets.p, work.targets.tail)
        return self.divergence(teacher, StudentRows(work.z, work.owned, lse, lset))

    def _to_gradient(self, work: TopKWork, normalisers: Tensor, result: RowResult, scale: Tensor) -> None:
        """exp(z − shift) → scale·dL/dx: one number a row outside S, K values on S, one at the label."""
        arguments, logits = self.arguments, work.logits
        t = arguments.temperature
        lset = finite_or_zero(normalisers[1])
        kd_scale = scale * (arguments.kd_scale / t)
        outside = kd_scale * result.dlset * (work.shift - lset).exp()
        on_set = kd_scale[:, None] * result.dz
        if work.label is None:
            logits.mul_(outside[:, None])
        else:
            column, here, _, weight = work.label
            ce_scale, ce_lse = scale * weight, self._ce_normaliser(normalisers)
            on_set = on_set + ce_scale[:, None] * (t * work.z - ce_lse[:, None]).exp()
            ce_outside = ce_scale * (t * work.shift - ce_lse).exp()
            if self.own_ce_sum:
                ce_part = logits.pow(t).mul_(ce_outside[:, None])
                logits.mul_(outside[:, None]).add_(ce_part)
            else:
                logits.mul_((outside + ce_outside)[:, None])
            add_at_(logits, column, torch.where(here, -ce_scale[:, None], 0.0))
        add_at_(logits, work.columns, torch.where(work.owned, on_set, 0.0))
        if work.slope is not None:
            logits.mul_(work.slope)
