"""The row kernel of a full-vocabulary teacher whose logits are projected beside the student's.

n rows, V columns of this shard; z = y/T of the student, u of the teacher, p = softmax(u), q = softmax(z). The two KL
divergences are linear in log p and log q: their value is a sum that fits in the exchange of the normalisers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_kd.losses import passes as forms
from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.kernels import LabelPart, Labels, RowBatch, RowValues, VocabRange, label_rows
from megatron_kd.losses.logits import finite_or_zero, log_of_sums
from megatron_kd.losses.passes import FullPass, Scaling


@dataclass(frozen=True)
class FullRows:
    """n rows before their logits."""

    batch: RowBatch
    labels: Labels | None

    def __getitem__(self, part: slice) -> FullRows:
        return FullRows(self.batch[part], None if self.labels is None else self.labels[part])


@dataclass
class FullWork:
    """A block between the steps; ``block`` is None for merged slices.

    Attributes:
        normalisers: [S, n], from ``combine`` on: lse of z, of u, that of the cross-entropy where it is another.
        figures: (this rank's Σd, top-1 agreement, label's logit at T = 1 or None), each [n].
        expectation: E [n]; None until a second exchange.
    """

    block: FullPass | None
    rows: FullRows
    label: LabelPart | None
    packed: Tensor
    normalisers: Tensor | None = None
    figures: tuple[Tensor, Tensor, Tensor | None] | None = None
    expectation: Tensor | None = None


class FullKernel:
    """Row kernel of ``linear_full_divergence``; see kernels.py for the protocol."""

    def __init__(
        self,
        arguments: LossArguments,
        divergence: Divergence,
        teacher_logit_softcap: float | None,
        device: torch.device,
    ) -> None:
        self.arguments = arguments
        self.divergence = divergence
        self.scaling = Scaling(arguments.temperature, arguments.logit_softcap)
        self.teacher_scaling = Scaling(arguments.temperature, teacher_logit_softcap)
        self.passes = forms.passes_for(device)
        self.own_ce_sum = arguments.mixes_ce and arguments.temperature != 1.0
        self.saves_expectation = divergence.expectation != "known"
        self.saved_rows = 2 + self.own_ce_sum + self.saves_expectation
        # The others need both normalisers before their sums, when the logits of earlier slices are gone.
        self.tileable = divergence.expectation != "exchanged"

    def reads_again(self) -> tuple[Tensor, ...]:
        """See the protocol: the teacher's logits are no tensor of the caller."""
        return ()

    def prepare(self, batch: RowBatch) -> FullRows:
        """See the protocol."""
        return FullRows(batch, label_rows(self.arguments, batch))

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, rows: FullRows, part: VocabRange) -> FullWork:
        """Five to nine floats a row go into the exchange: both maxima and sums, z at argmax u, …"""
        block, label = self._open(logits, teacher_logits, rows, part)
        sums = block.sums(self.divergence, self.own_ce_sum)
        parts = [sums.student.highest, sums.student.total, sums.teacher.highest, sums.teacher.total, sums.z_at_best]
        if label is not None:
            parts.append(label.z[:, 0])
        if sums.student.ce_total is not None:
            parts.append(sums.student.ce_total)
        if sums.cross is not None:
            parts += [sums.offset, sums.cross]
        return FullWork(block, rows, label, torch.stack(parts))

    def merge(self, works: list[FullWork]) -> FullWork:
        """See the protocol."""
        return replace(works[0], block=None, packed=self._merged(torch.stack([work.packed for work in works])))

    def _merged(self, packed: Tensor) -> Tensor:
        """[slices, F, n] → [F, n]: maxima of all, sums relative to them, cross sums by the first slice's reference."""
        columns = iter(packed.unbind(dim=1))
        z_max, z_sum, u_max, u_sum, z_best = (next(columns) for _ in range(5))
        z_top, u_top = z_max.amax(dim=0), u_max.amax(dim=0)
        z_way, u_way = z_max - finite_or_zero(z_top), u_max - finite_or_zero(u_top)
        parts = [z_top, (z_way.exp() * z_sum).sum(dim=0), u_top, (u_way.exp() * u_sum).sum(dim=0)]
        parts.append(_at_first_best(z_best, u_max))
        if self.arguments.mixes_ce:
            parts.append(next(columns).amax(dim=0))
        if self.own_ce_sum:
            parts.append(((self.arguments.temperature * z_way).exp() * next(columns)).sum(dim=0))
        if self.divergence.expectation != "exchanged":
            offset, cross = next(columns), next(columns)
            way, total, sign = (u_way, u_sum, 1.0) if self.divergence.name == "forward_kl" else (z_way, z_sum, -1.0)
            parts += [offset[0], (way.exp() * (cross + sign * (offset - offset[0]) * total)).sum(dim=0)]
        return torch.stack(parts)

    def combine(self, work: FullWork, gathered: Tensor) -> Tensor | None:
        """See the protocol."""
        columns = iter(gathered.unbind(dim=1))
        z_max, z_sum, u_max, u_sum, z_best = (next(columns) for _ in range(5))
        saved = [log_of_sums(z_max, z_sum), log_of_sums(u_max, u_sum)]
        t, label_z = self.arguments.temperature, None
        if work.label is not None:
            label_z = t * next(columns).amax(dim=0)
        if self.own_ce_sum:
            saved.append(log_of_sums(t * z_max, next(columns)))
        work.normalisers = torch.stack(saved)
        top1 = _at_first_best(z_best, u_max) >= z_max.amax(dim=0)
        if self.divergence.expectation == "exchanged":
            assert work.block is not None
            d, u = work.block.values(self.divergence, saved[0], saved[1])
            work.figures = d, top1, label_z
            return u.unsqueeze(0)
        own = self._linear_value(work.packed[None], saved[0], saved[1])
        work.figures = own, top1, label_z
        if self.divergence.expectation == "known":
            work.expectation = torch.full_like(own, -1.0)
        else:
            work.expectation = self._linear_value(gathered, saved[0], saved[1])
        return None

    def _linear_value(self, packed: Tensor, lse_z: Tensor, lse_u: Tensor) -> Tensor:
        """Σd [n] over the shards of ``packed`` [shards, F, n], by the cross sums.

        Forward KL: exp(max u − lse_u)·(Σ e^(u − max u)(u − z − r) + (r − (lse_u − lse_z))·Σ e^(u − max u)); reverse KL
        with the roles changed. The difference in brackets is formed before it meets the sum, which keeps the digits.
        """
        offset, cross = packed[:, -2], packed[:, -1]
        shift = offset - (lse_u - lse_z)
        if self.divergence.name == "forward_kl":
            factor = (packed[:, 2] - lse_u).exp()
            parts = factor * (cross + shift * packed[:, 3])
        else:
            factor = (packed[:, 0] - lse_z).exp()
            parts = factor * (cross - shift * packed[:, 1])
        return parts.sum(dim=0)

    def finish(self, work: FullWork, gathered: Tensor | None, scale: Tensor | None) -> RowValues:
        """See the protocol."""
        assert work.normalisers is not None and work.figures is not None, "combine comes first"
        kd, top1, label_z = work.figures
        if gathered is not None:
            work.expectation = gathered[:, 0].sum(dim=0)
        assert work.expectation is not None
        normalisers, labels = work.normalisers, work.rows.labels
        ce = torch.zeros_like(kd)
        if labels is not None and label_z is not None:
            ce = torch.where(labels.weight != 0, self._ce_lse(normalisers) - label_z, 0.0)
        one = torch.ones_like(kd)
        figures = torch.stack([kd, torch.zeros_like(kd), ce, one, one, top1.to(kd.dtype)])
        if scale is not None:
            assert work.block is not None
            self._write(work.block, work.label, work.rows, normalisers, work.expectation, scale)
        saved = torch.cat([normalisers, work.expectation[None]]) if self.saves_expectation else normalisers
        return RowValues(torch.where(work.rows.batch.valid, figures, 0.0), saved)

    def gradient(
        self,
        logits: Tensor,
        teacher_logits: Tensor | None,
        rows: FullRows,
        part: VocabRange,
        saved: Tensor,
        scale: Tensor,
    ) -> None:
        """See the protocol."""
        block, label = self._open(logits, teacher_logits, rows, part)
        expectation = saved[-1] if self.saves_expectation else torch.full_like(saved[0], -1.0)
        self._write(block, label, rows, saved, expectation, scale)

    def _open(
        self, logits: Tensor, teacher_logits: Tensor | None, rows: FullRows, part: VocabRange
    ) -> tuple[FullPass, LabelPart | None]:
        assert teacher_logits is not None
        block = self.passes.full(logits, self.scaling, teacher_logits, self.teacher_scaling)
        return block, LabelPart.of(rows.labels, block, part)

    def _ce_lse(self, normalisers: Tensor) -> Tensor:
        return normalisers[2] if self.own_ce_sum else normalisers[0]

    def _write(
        self,
        block: FullPass,
        label: LabelPart | None,
        rows: FullRows,
        normalisers: Tensor,
        expectation: Tensor,
        scale: Tensor,
    ) -> None:
        kd_scale = scale * (self.arguments.kd_scale / self.arguments.temperature)
        lse_z, lse_u = normalisers[0], normalisers[1]
        if label is None or rows.labels is None:
            block.write(self.divergence, lse_z, lse_u, expectation, kd_scale, None, None)
            return
        ce_scale = scale * rows.labels.weight
        block.write(self.divergence, lse_z, lse_u, expectation, kd_scale, ce_scale, self._ce_lse(normalisers))
        label.subtract(block, ce_scale)


def _at_first_best(z_best: Tensor, u_max: Tensor) -> Tensor:
    """z at the teacher's best id [n]: that of the first of [shards, n] with the largest teacher logit."""
    return z_best.gather(0, u_max.argmax(dim=0, keepdim=True))[0]
