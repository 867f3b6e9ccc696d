"""The passes over the large matrices: what a row kernel needs done to a block of logits [n, V], in two forms.

Everything that is [n] or [n, K] is done once, in topk_kernel.py and full_kernel.py. The passes over [n, V] decide the
speed beside the GEMMs and exist as eager torch (eager_passes.py: any device, in place, a block that fits in the cache
at a time) and as Triton kernels (triton_passes.py: one read for the statistics, one read and write for the gradient).

x are the raw logits, y = cap·tanh(x/cap) or x, z = y/T, u the teacher's logits likewise. Hidden entries (those of the
cached ids) count as −inf in ``sums`` and as 0 in ``write``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_kd.losses.divergences import Divergence


@dataclass(frozen=True)
class Scaling:
    """From raw logits to z: temperature T and the soft-cap, None for none."""

    temperature: float
    softcap: float | None


class RowSums(NamedTuple):
    """Per row: max z [n] (−inf where nothing is left), Σexp(z − max) [n], and Σexp(T·(z − max)) [n] where asked."""

    highest: Tensor
    total: Tensor
    ce_total: Tensor | None


class PairSums(NamedTuple):
    """Per row of a student beside a teacher, over this shard.

    Attributes:
        student, teacher: the sums of z and of u.
        z_at_best: z at the first largest u [n], −inf for an empty shard.
        offset: a reference r [n] for u − z, so that ``cross`` loses no digits.
        cross: Σexp(u − max u)·(u − z − r) [n] for forward KL, Σexp(z − max z)·(z − u + r) [n] for reverse KL, 0 where
            the exponential is; None for the others.
    """

    student: RowSums
    teacher: RowSums
    z_at_best: Tensor
    offset: Tensor
    cross: Tensor | None


class TopKPass(Protocol):
    """A block of student logits [n, V], which it overwrites. Calls come in this order; ``sums`` may be left out."""

    def take(self, columns: Tensor, owned: Tensor) -> Tensor:
        """z [n, K] at ``columns`` (int64), −inf where not ``owned``."""

    def hide(self, columns: Tensor, owned: Tensor) -> None:
        """Hides the owned entries."""

    def sums(self, with_ce: bool) -> RowSums:
        """The sums over what is not hidden."""

    def write(self, scale: Tensor, shift: Tensor, ce_scale: Tensor | None, ce_shift: Tensor | None) -> None:
        """The block becomes (scale·exp(z − shift) + ce_scale·exp(T·z − ce_shift))·dy/dx; all arguments are [n]."""

    def add(self, columns: Tensor, values: Tensor, z: Tensor) -> None:
        """Adds values [n, K]·dy/dx at ``columns``; z as it was taken, values 0 where not owned."""


class FullPass(Protocol):
    """A block of student and teacher logits [n, V], both of which it overwrites. Order as above; ``values`` follows the
    sums of divergences without a cross sum only."""

    def take(self, columns: Tensor, owned: Tensor) -> Tensor:
        """z [n, K] of the student at ``columns``, −inf where not ``owned``."""

    def sums(self, divergence: Divergence, with_ce: bool) -> PairSums:
        """One read of both matrices."""

    def values(self, divergence: Divergence, lse_z: Tensor, lse_u: Tensor) -> tuple[Tensor, Tensor]:
        """(Σd, Σu) [n] over this shard, of log p = u − lse_u and log q = z − lse_z."""

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
        """The student's block becomes (scale·(u_j − q_j·E) + ce_scale·exp(T·z − ce_shift))·dy/dx."""

    def add(self, columns: Tensor, values: Tensor, z: Tensor) -> None:
        """Adds values [n, K]·dy/dx to the student's block at ``columns``."""


class Passes(Protocol):
    """One form of the passes."""

    name: str
    # Whether a soft-cap needs a second block (the chunk budget counts it).
    keeps_slope: bool
    # Whether a chunk is worked on in blocks that stay in the cache between passes; else whole, in one launch a pass.
    in_blocks: bool

    def topk(self, logits: Tensor, scaling: Scaling) -> TopKPass:
        """Begins a block of the student's logits alone."""

    def full(self, logits: Tensor, scaling: Scaling, teacher_logits: Tensor, teacher_scaling: Scaling) -> FullPass:
        """Begins a block of both models' logits."""


def slope_at(z: Tensor, scaling: Scaling) -> Tensor | float:
    """dy/dx at entries of z: 1 − (y/cap)²; finite where z is −inf."""
    if scaling.softcap is None:
        return 1.0
    y = torch.where(z == -torch.inf, 0.0, z) * (scaling.temperature / scaling.softcap)
    return 1.0 - y * y


def passes_for(device: torch.device) -> Passes:
    """Triton on a GPU where it is installed, else eager torch."""
    if device.type != "cpu":
        from megatron_kd.losses import triton_passes

        if triton_passes.AVAILABLE:
            return triton_passes.TritonPasses()
    from megatron_kd.losses.eager_passes import EagerPasses

    return EagerPasses()
