"""The row kernel of cached top-K targets.

n rows, V columns of this shard, K cached ids (S), z = y/T the scaled logits. Outside S the gradient of every
divergence is one number a row times exp(z_j − lset), lset = logsumexp of z outside S: so the large matrix needs two
sums before the exchange and one multiplication after it, whatever the divergence, and everything on S is [n, K].

The logsumexp outside S is a *masked* one whose maximum is its own: no 1 − Σq, which loses every digit once S holds
nearly all the mass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_kd.losses import passes as forms
from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.divergences import TAILS, Divergence
from megatron_kd.losses.kernels import LabelPart, Labels, RowBatch, RowValues, VocabRange, label_rows
from megatron_kd.losses.logits import finite_or_zero, log_of_sums, owned_columns
from megatron_kd.losses.passes import Scaling, TopKPass
from megatron_kd.losses.target_rows import TargetRows, target_rows
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class TopKRows:
    """n rows before their logits: cached ids, and the teacher after the treatment of the tail: log p [n, K], its mass
    and that of the tail [n]."""

    batch: RowBatch
    targets: TargetRows
    log_p: Tensor
    p_mass: Tensor
    p_tail: Tensor
    labels: Labels | None

    def __getitem__(self, part: slice) -> TopKRows:
        return TopKRows(
            self.batch[part],
            self.targets[part],
            self.log_p[part],
            self.p_mass[part],
            self.p_tail[part],
            None if self.labels is None else self.labels[part],
        )


@dataclass
class TopKWork:
    """A block between the steps.

    Attributes:
        block: the logits; None for merged slices.
        columns, owned, z: [n, K], the columns in this shard, whether it owns them, and z, −inf where it does not.
        packed: see the protocol.
        global_: what ``combine`` found.
    """

    block: TopKPass | None
    rows: TopKRows
    columns: Tensor
    owned: Tensor
    z: Tensor
    label: LabelPart | None
    packed: Tensor
    global_: Combined | None = None


@dataclass
class Combined:
    """What is known of n rows after the first exchange.

    Attributes:
        normalisers: [S, n]: lse, lset, then lse over S and that of the cross-entropy where they are used.
        terms: d and u by the divergence.
        expectation_set: Σu over S of all ranks [n]; None until a second exchange.
        lse_set: logsumexp of z on S [n].
        top1: [n], whether the teacher's best id has the largest logit.
        label_z: the label's logit at T = 1 [n]; None without cross-entropy.
    """

    normalisers: Tensor
    terms: Terms
    expectation_set: Tensor | None
    lse_set: Tensor
    top1: Tensor
    label_z: Tensor | None


@dataclass(frozen=True)
class Terms:
    """d and u on the owned ids of S (Σd [n], u [n, K]) and in the tail [n]; the student's q likewise."""

    d_set: Tensor
    d_tail: Tensor
    u: Tensor
    u_tail: Tensor
    q: Tensor
    q_tail: Tensor


class TopKKernel:
    """Row kernel of ``linear_topk_divergence``; see kernels.py for the protocol."""

    tileable = True

    def __init__(self, arguments: LossArguments, targets: TopKTargets, divergence: Divergence, tail: str) -> None:
        self.arguments = arguments
        self.targets = targets
        self.divergence = divergence
        self.tail = TAILS[tail]
        self.scaling = Scaling(arguments.temperature, arguments.logit_softcap)
        self.passes = forms.passes_for(targets.ids.device)
        # The cross-entropy is at T = 1: at another temperature it has a normaliser of its own.
        self.own_ce_sum = arguments.mixes_ce and arguments.temperature != 1.0
        self.saves_expectation = divergence.expectation != "known"
        self.saved_rows = 2 + self.tail.student_over_set + self.own_ce_sum + self.saves_expectation

    def reads_again(self) -> tuple[Tensor, ...]:
        """See the protocol."""
        return self.targets.ids, self.targets.logprobs, self.targets.tail_logmass

    def prepare(self, batch: RowBatch) -> TopKRows:
        """See the protocol."""
        rows = target_rows(self.targets, batch.rows, batch.valid, self.arguments.dtype)
        p, p_tail = self.tail.teacher(rows.p, rows.tail)
        log_p = self.divergence.cached_log_p(p)
        return TopKRows(batch, rows, log_p, p.sum(dim=1), p_tail, label_rows(self.arguments, batch))

    def begin(self, logits: Tensor, teacher_logits: Tensor | None, rows: TopKRows, part: VocabRange) -> TopKWork:
        """Five to nine floats a row go into the exchange: two maxima with their sums, z at the teacher's best id, …"""
        block, work = self._open(logits, rows, part)
        outside = block.sums(self.own_ce_sum)
        set_max = work.z.amax(dim=1)
        relative = work.z - finite_or_zero(set_max)[:, None]
        exponentials = relative.exp()
        parts = [outside.highest, outside.total, set_max, exponentials.sum(dim=1)]
        parts.append(work.z.gather(1, rows.targets.best)[:, 0])
        if work.label is not None:
            parts.append(work.label.z[:, 0])
        if outside.ce_total is not None:
            parts += [outside.ce_total, (self.arguments.temperature * relative).exp().sum(dim=1)]
        if self.divergence.expectation == "linear":
            # Σ q·(log q − log p) up to the normaliser: q is the exponential, log q is z.
            log_ratio = relative - rows.log_p
            parts.append(torch.where(exponentials != 0, exponentials * log_ratio, 0.0).sum(dim=1))
        work.packed = torch.stack(parts)
        return work

    def merge(self, works: list[TopKWork]) -> TopKWork:
        """See the protocol: an id is owned by one slice at most."""
        merged = replace(works[0], block=None)
        for work in works[1:]:
            merged.z = torch.maximum(merged.z, work.z)
            merged.owned = merged.owned | work.owned
        merged.packed = self._merged(torch.stack([work.packed for work in works]))
        return merged

    def _merged(self, packed: Tensor) -> Tensor:
        """[slices, F, n] → [F, n]: maxima of all, sums relative to them."""
        columns = iter(packed.unbind(dim=1))
        shift, tail_sum, set_max, set_sum, best = (next(columns) for _ in range(5))
        top, set_top = shift.amax(dim=0), set_max.amax(dim=0)
        outside, on_set = shift - finite_or_zero(top), set_max - finite_or_zero(set_top)
        parts = [top, (outside.exp() * tail_sum).sum(dim=0), set_top, (on_set.exp() * set_sum).sum(dim=0)]
        parts.append(best.amax(dim=0))
        if self.arguments.mixes_ce:
            parts.append(next(columns).amax(dim=0))
        if self.own_ce_sum:
            t = self.arguments.temperature
            parts += [((t * way).exp() * next(columns)).sum(dim=0) for way in (outside, on_set)]
        if self.divergence.expectation == "linear":
            parts.append(self._linear_sums(on_set, set_sum, next(columns)).sum(dim=0))
        return torch.stack(parts)

    @staticmethod
    def _linear_sums(relative: Tensor, set_sum: Tensor, linear: Tensor) -> Tensor:
        """Σ e^(z − m)(z − m − log p) taken relative to m − ``relative`` instead of m."""
        return relative.exp() * (linear + finite_or_zero(relative) * set_sum)

    def combine(self, work: TopKWork, gathered: Tensor) -> Tensor | None:
        """See the protocol."""
        columns = iter(gathered.unbind(dim=1))
        shift, tail_sum, set_max, set_sum, best = (next(columns) for _ in range(5))
        lset = log_of_sums(shift, tail_sum)
        lse_set = log_of_sums(set_max, set_sum)
        saved = [torch.logaddexp(lse_set, lset), lset]
        if self.tail.student_over_set:
            saved.append(lse_set)
        label_z = None
        if work.label is not None:
            label_z = self.arguments.temperature * next(columns).amax(dim=0)
        if self.own_ce_sum:
            t = self.arguments.temperature
            outside, on_set = next(columns), next(columns)
            saved.append(torch.logaddexp(log_of_sums(t * shift, outside), log_of_sums(t * set_max, on_set)))
        normalisers = torch.stack(saved)
        terms = self._terms(work.rows, work.z, work.owned, normalisers)
        highest = torch.maximum(shift.amax(dim=0), set_max.amax(dim=0))
        found = Combined(normalisers, terms, None, lse_set, best.amax(dim=0) >= highest, label_z)
        work.global_ = found
        if self.divergence.expectation == "exchanged":
            return terms.u.sum(dim=1).unsqueeze(0)
        if self.divergence.expectation == "known":
            found.expectation_set = -work.rows.p_mass
        else:
            parts = self._linear_sums(set_max - self._student_lse(normalisers), set_sum, next(columns))
            found.expectation_set = parts.sum(dim=0)
        return None

    def finish(self, work: TopKWork, gathered: Tensor | None, scale: Tensor | None) -> RowValues:
        """See the protocol."""
        found, rows = work.global_, work.rows
        assert found is not None, "combine comes first"
        if gathered is not None:
            found.expectation_set = gathered[:, 0].sum(dim=0)
        assert found.expectation_set is not None
        expectation = found.expectation_set + found.terms.u_tail
        normalisers = found.normalisers
        lse = normalisers[0]
        ce = torch.zeros_like(lse)
        if rows.labels is not None and found.label_z is not None:
            ce = torch.where(rows.labels.weight != 0, self._ce_lse(normalisers) - found.label_z, 0.0)
        figures = torch.stack(
            [
                found.terms.d_set,
                found.terms.d_tail,
                ce,
                rows.targets.mass,
                (found.lse_set - lse).exp(),
                found.top1.to(lse.dtype),
            ]
        )
        if scale is not None:
            self._write(work, normalisers, found.terms, expectation, scale)
        saved = torch.cat([normalisers, expectation[None]]) if self.saves_expectation else normalisers
        return RowValues(torch.where(rows.batch.valid, figures, 0.0), saved)

    def gradient(
        self,
        logits: Tensor,
        teacher_logits: Tensor | None,
        rows: TopKRows,
        part: VocabRange,
        saved: Tensor,
        scale: Tensor,
    ) -> None:
        """See the protocol: lset takes the place of the local maximum, so neither maximum nor sum is needed."""
        _, work = self._open(logits, rows, part)
        terms = self._terms(rows, work.z, work.owned, saved)
        expectation = saved[-1] if self.saves_expectation else terms.u_tail - rows.p_mass
        self._write(work, saved, terms, expectation, scale)

    def _open(self, logits: Tensor, rows: TopKRows, part: VocabRange) -> tuple[TopKPass, TopKWork]:
        block = self.passes.topk(logits, self.scaling)
        columns, owned = owned_columns(rows.targets.ids, part.start, part.rows)
        z = block.take(columns, owned)
        label = LabelPart.of(rows.labels, block, part)
        block.hide(columns, owned)
        return block, TopKWork(block, rows, columns, owned, z, label, logits.new_empty(0))

    def _ce_lse(self, normalisers: Tensor) -> Tensor:
        return normalisers[2 + self.tail.student_over_set] if self.own_ce_sum else normalisers[0]

    def _student_lse(self, normalisers: Tensor) -> Tensor:
        """What log q is taken relative to."""
        # A row without ids has lse_set = −inf; it must give 0, not −inf − (−inf).
        return finite_or_zero(normalisers[2]) if self.tail.student_over_set else normalisers[0]

    def _terms(self, rows: TopKRows, z: Tensor, owned: Tensor, normalisers: Tensor) -> Terms:
        lse, lset = self._student_lse(normalisers), normalisers[1]
        log_q = z - lse[:, None]
        d, u = self.divergence.terms(rows.log_p, log_q)
        d_set, u = torch.where(owned, d, 0.0).sum(dim=1), torch.where(owned, u, 0.0)
        q = torch.where(owned, log_q.exp(), 0.0)
        if self.tail.student_over_set:
            nothing = torch.zeros_like(lse)
            return Terms(d_set, nothing, u, nothing, q, nothing)
        # A tail that the student's vocabulary does not have counts as 0.
        exists = lset != -torch.inf
        log_p_tail = self.divergence.cached_log_p(torch.where(exists, rows.p_tail, 0.0))
        log_q_tail = torch.where(exists, lset - lse, -torch.inf)
        d_tail, u_tail = self.divergence.terms(log_p_tail, log_q_tail)
        return Terms(d_set, d_tail, u, u_tail, q, log_q_tail.exp())

    def _write(self, work: TopKWork, normalisers: Tensor, terms: Terms, expectation: Tensor, scale: Tensor) -> None:
        """The block → scale·dL/dx: one number a row outside S, K values on S, one at the label."""
        block, t = work.block, self.arguments.temperature
        assert block is not None
        kd_scale = scale * (self.arguments.kd_scale / t)
        outside = kd_scale * (terms.u_tail - terms.q_tail * expectation)
        on_set = kd_scale[:, None] * (terms.u - terms.q * expectation[:, None])
        if work.label is None or work.rows.labels is None:
            block.write(outside, normalisers[1], None, None)
        else:
            ce_scale, ce_lse = scale * work.rows.labels.weight, self._ce_lse(normalisers)
            on_set = on_set + ce_scale[:, None] * (t * work.z - ce_lse[:, None]).exp()
            block.write(outside, normalisers[1], ce_scale, ce_lse)
            work.label.subtract(block, ce_scale)
        block.add(work.columns, torch.where(work.owned, on_set, 0.0), work.z)
