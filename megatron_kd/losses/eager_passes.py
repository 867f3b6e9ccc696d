"""The passes in eager torch: in place, on a block small enough to stay in the cache between them.

n rows, V columns. ``sums`` leaves the exponentials behind, so that ``write`` needs one multiplication a row.

A cross-entropy at T ≠ 1 needs exp(T·z) beside exp(z). The one with the smaller factor is kept and the other is a power
of it above 1: the other way round, what the first has lost to underflow would be missing from the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.logits import add_at_, finite_or_zero, row_max, scale_, take
from megatron_kd.losses.passes import FullPass, PairSums, RowSums, Scaling, TopKPass, slope_at


class EagerTopK(TopKPass):
    """See ``TopKPass``.

    ``shift`` is None until the block holds exp(power·(z − shift)); ``power`` is 1, or T < 1 with a cross-entropy.
    """

    def __init__(self, logits: Tensor, scaling: Scaling) -> None:
        self.logits = logits
        self.scaling = scaling
        self.slope = scale_(logits, scaling.temperature, scaling.softcap)
        self.shift: Tensor | None = None
        self.power = 1.0

    def take(self, columns: Tensor, owned: Tensor) -> Tensor:
        """See the protocol."""
        return take(self.logits, columns, owned)

    def hide(self, columns: Tensor, owned: Tensor) -> None:
        """See the protocol."""
        add_at_(self.logits, columns, torch.where(owned, -torch.inf, 0.0))

    def sums(self, with_ce: bool) -> RowSums:
        """See the protocol: maximum, subtract, exp, sum."""
        highest, t = row_max(self.logits), self.scaling.temperature
        self._exp(highest, min(1.0, t) if with_ce else 1.0)
        kept = self.logits.sum(dim=1)
        if not with_ce:
            return RowSums(highest, kept, None)
        if self.power == 1.0:
            return RowSums(highest, kept, self.logits.pow(t).sum(dim=1))
        return RowSums(highest, self.logits.pow(1.0 / t).sum(dim=1), kept)

    def _exp(self, shift: Tensor, power: float) -> None:
        self.shift, self.power = shift, power
        self.logits.sub_(finite_or_zero(shift)[:, None])
        if power != 1.0:
            self.logits.mul_(power)
        self.logits.exp_()

    def write(self, scale: Tensor, shift: Tensor, ce_scale: Tensor | None, ce_shift: Tensor | None) -> None:
        """See the protocol."""
        logits, t = self.logits, self.scaling.temperature
        ce_part = None
        if self.shift is None:
            if ce_scale is not None and ce_shift is not None and t != 1.0:
                # From z: a power of exp(z − shift), whose shift may be far above all z, would come out as 0·∞.
                ce_part = (logits * t).sub_(ce_shift[:, None]).exp_().mul_(ce_scale[:, None])
                ce_scale = None
            self._exp(shift, 1.0)
        assert self.shift is not None
        # A row of hidden entries alone has the shift −inf: its exponentials are 0, and so must their factor be.
        factor = scale * (self.shift - finite_or_zero(shift)).exp()
        if ce_scale is not None and ce_shift is not None:
            ce_factor = ce_scale * (t * self.shift - ce_shift).exp()
            if t == 1.0:
                factor = factor + ce_factor
            elif self.power == 1.0:
                ce_part = logits.pow(t).mul_(ce_factor[:, None])
            else:
                ce_part = logits * ce_factor[:, None]
                logits.pow_(1.0 / t)
        logits.mul_(factor[:, None])
        if ce_part is not None:
            logits.add_(ce_part)
        if self.slope is not None:
            logits.mul_(self.slope)

    def add(self, columns: Tensor, values: Tensor, z: Tensor) -> None:
        """See the protocol."""
        add_at_(self.logits, columns, values * slope_at(z, self.scaling))


class EagerFull(FullPass):
    """See ``FullPass``. What one step has computed stays in the blocks for the next.

    ``shifts`` is None until, for forward KL, they hold exp(z − shift) and exp(u − shift); ``holds_terms`` says that
    the teacher's block holds the u_j of a divergence that forms them before ``write``.
    """

    def __init__(self, logits: Tensor, scaling: Scaling, teacher_logits: Tensor, teacher_scaling: Scaling) -> None:
        self.z, self.u = logits, teacher_logits
        self.scaling = scaling
        self.slope = scale_(logits, scaling.temperature, scaling.softcap)
        scale_(teacher_logits, teacher_scaling.temperature, teacher_scaling.softcap)
        self.shifts: tuple[Tensor, Tensor] | None = None
        self.holds_terms = False

    def take(self, columns: Tensor, owned: Tensor) -> Tensor:
        """See the protocol."""
        return take(self.z, columns, owned)

    def sums(self, divergence: Divergence, with_ce: bool) -> PairSums:
        """See the protocol; the reference r is u − z at the first column."""
        z, u = self.z, self.u
        if z.shape[1] == 0:
            empty, none = z.new_full(z.shape[:1], -torch.inf), z.new_zeros(z.shape[:1])
            student = RowSums(empty, none, none if with_ce else None)
            cross = none if divergence.name in _CROSS_SIGN else None
            return PairSums(student, RowSums(empty, none, None), empty, none, cross)
        z_max = row_max(z)
        u_max, best = u.max(dim=1, keepdim=True)
        z_at_best, offset = z.gather(1, best)[:, 0], u[:, 0] - z[:, 0]
        difference = (u - z).sub_(offset[:, None]) if divergence.name in _CROSS_SIGN else None
        ce_total = None
        if with_ce:
            # Not a power of exp(z − max), which at T < 1 has lost to underflow what still counts here.
            ce_total = (z - z_max[:, None]).mul_(self.scaling.temperature).exp_().sum(dim=1)
        if divergence.name == "forward_kl" and not with_ce:
            self.shifts = z_max, u_max[:, 0]
            z_exp, u_exp = z.sub_(z_max[:, None]).exp_(), u.sub_(u_max).exp_()
        else:
            z_exp, u_exp = (z - z_max[:, None]).exp_(), (u - u_max).exp_()
        student = RowSums(z_max, z_exp.sum(dim=1), ce_total)
        teacher = RowSums(u_max[:, 0], u_exp.sum(dim=1), None)
        cross = None
        if difference is not None:
            by = u_exp if divergence.name == "forward_kl" else z_exp
            cross = difference.mul_(by).sum(dim=1).mul_(_CROSS_SIGN[divergence.name])
        return PairSums(student, teacher, z_at_best, offset, cross)

    def values(self, divergence: Divergence, lse_z: Tensor, lse_u: Tensor) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        d, u = divergence.terms(self.u - lse_u[:, None], self.z - lse_z[:, None])
        if divergence.expectation == "exchanged":
            self.u.copy_(u)
            self.holds_terms = True
        return d.sum(dim=1), u.sum(dim=1)

    def write(
        self,
        divergence: Divergence,
        lse_z: Tensor,
        lse_u: Tensor,
        expectation: Tensor,
        scale: Tensor,
        ce_scale: Tensor | None,
        ce_shift: Tensor | None,
    ) -> None:
        """See the protocol."""
        z = self.z
        # At T ≠ 1 the cross-entropy needs z itself.
        if divergence.name == "forward_kl" and (ce_scale is None or self.scaling.temperature == 1.0):
            self._write_forward_kl(lse_z, lse_u, expectation, scale, ce_scale, ce_shift)
        else:
            ce_part = None
            if ce_scale is not None and ce_shift is not None:
                ce_part = (z * self.scaling.temperature).sub_(ce_shift[:, None]).exp_().mul_(ce_scale[:, None])
            log_q = z.sub_(lse_z[:, None])
            terms = self.u if self.holds_terms else divergence.terms(self.u.sub_(lse_u[:, None]), log_q)[1]
            z.exp_().mul_(-expectation[:, None]).add_(terms).mul_(scale[:, None])
            if ce_part is not None:
                z.add_(ce_part)
        if self.slope is not None:
            z.mul_(self.slope)

    def _write_forward_kl(
        self,
        lse_z: Tensor,
        lse_u: Tensor,
        expectation: Tensor,
        scale: Tensor,
        ce_scale: Tensor | None,
        ce_shift: Tensor | None,
    ) -> None:
        """u_j is −p_j: both terms and the cross-entropy's are factors of the exponentials."""
        z, u = self.z, self.u
        if self.shifts is None:
            self.shifts = lse_z, lse_u
            z.sub_(lse_z[:, None]).exp_()
            u.sub_(lse_u[:, None]).exp_()
        z_shift, u_shift = self.shifts
        factor = -scale * expectation * (z_shift - lse_z).exp()
        if ce_scale is not None and ce_shift is not None:
            factor = factor + ce_scale * (z_shift - ce_shift).exp()
        z.mul_(factor[:, None]).addcmul_(u, (scale * (u_shift - lse_u).exp())[:, None], value=-1)

    def add(self, columns: Tensor, values: Tensor, z: Tensor) -> None:
        """See the protocol."""
        add_at_(self.z, columns, values * slope_at(z, self.scaling))


# The sign of (u − z − r) in the cross sum.
_CROSS_SIGN = {"forward_kl": 1.0, "reverse_kl": -1.0}


class EagerPasses:
    """See ``Passes``."""

    name = "eager"
    keeps_slope = True
    in_blocks = True

    def topk(self, logits: Tensor, scaling: Scaling) -> EagerTopK:
        """See the protocol."""
        return EagerTopK(logits, scaling)

    def full(self, logits: Tensor, scaling: Scaling, teacher_logits: Tensor, teacher_scaling: Scaling) -> EagerFull:
        """See the protocol."""
        return EagerFull(logits, scaling, teacher_logits, teacher_scaling)
