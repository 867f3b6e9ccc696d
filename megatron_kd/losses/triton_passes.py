"""The passes as Triton kernels: their host side, which checks, allocates a few floats a row and launches.

n rows, V columns, K columns a row that are treated one by one. The kernels are in triton_kernels.py and
triton_full_kernels.py, with what each reads and writes. The block keeps the raw logits until ``write``: scaling and
soft-cap are done in registers at every read. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.passes import FullPass, PairSums, RowSums, Scaling, TopKPass

try:
    import triton
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True
    from megatron_kd.losses import triton_full_kernels, triton_kernels

# Columns at a time, powers of two: 16 float32 a thread where one matrix is read, 8 and 8 where two are. So several
# programs share a multiprocessor, each with 16 KB of loads on its way, which is what saturating the memory takes.
BLOCK = 4096
PAIR_BLOCK = 2048
SLOTS_BLOCK = 1024
WARPS = 8


def _checked(logits: Tensor) -> Tensor:
    """The block, or ValueError for one that the kernels cannot take."""
    if logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the row kernels take float32 or float64 logits, not {logits.dtype}")
    if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"a block of logits must be [n, V] with adjacent columns; its shape is {tuple(logits.shape)}, its strides "
            f"are {logits.stride()}"
        )
    return logits


def _launch(kernel: Any, logits: Tensor, width: int, block: int, *arguments: Any, **constants: Any) -> None:
    """One program per row of ``logits`` over ``width`` entries, on the block's own device; none for an empty block."""
    if logits.numel() == 0 or width == 0:
        return
    block = min(block, triton.next_power_of_2(width))
    warps = WARPS if block >= 128 * WARPS else 4
    # Triton launches on the current device, not on that of its arguments.
    with torch.accelerator.device_index(logits.device.index):
        kernel[(logits.shape[0],)](*arguments, **constants, BLOCK=block, num_warps=warps)


class _Block:
    """The student's block, with the passes that touch K columns a row."""

    def __init__(self, logits: Tensor, scaling: Scaling) -> None:
        self.logits = _checked(logits)
        self.constants = {"TEMPERATURE": scaling.temperature, "SOFTCAP": scaling.softcap}

    def _as_read(self, values: Tensor | None, *width: int) -> Tensor | None:
        """Numbers [n, *width] as the kernels read them; as a rule the tensor itself."""
        return None if values is None else values.to(self.logits.dtype).expand(len(self.logits), *width).contiguous()

    def take(self, columns: Tensor, owned: Tensor) -> Tensor:
        """See the protocol."""
        logits, K = self.logits, columns.shape[1]
        z = logits.new_empty(columns.shape)
        if logits.shape[1] == 0:
            return z.fill_(-torch.inf)
        arguments = logits, logits.stride(0), K, columns.contiguous(), owned.contiguous(), z
        _launch(triton_kernels.take_kernel, logits, K, SLOTS_BLOCK, *arguments, **self.constants)
        return z

    def add(self, columns: Tensor, values: Tensor, z: Tensor) -> None:
        """See the protocol; the columns of a row must be distinct where the value is not 0."""
        logits, K = self.logits, columns.shape[1]
        arguments = logits, logits.stride(0), K, columns.contiguous(), self._as_read(values, K), self._as_read(z, K)
        _launch(triton_kernels.add_kernel, logits, K, SLOTS_BLOCK, *arguments, **self.constants)

    def _empty(self) -> Tensor:
        return self.logits.new_empty(self.logits.shape[:1])


class TritonTopK(_Block, TopKPass):
    """See ``TopKPass``."""

    def hide(self, columns: Tensor, owned: Tensor) -> None:
        """See the protocol: raw logits of −inf are what the kernels take for hidden."""
        logits, K = self.logits, columns.shape[1]
        arguments = logits, logits.stride(0), K, columns.contiguous(), owned.contiguous()
        _launch(triton_kernels.hide_kernel, logits, K, SLOTS_BLOCK, *arguments)

    def sums(self, with_ce: bool) -> RowSums:
        """See the protocol: one read."""
        logits, V = self.logits, self.logits.shape[1]
        if V == 0:
            return _no_sums(logits, with_ce)
        sums = RowSums(self._empty(), self._empty(), self._empty() if with_ce else None)
        arguments = logits, logits.stride(0), V, *sums
        _launch(triton_kernels.topk_sums_kernel, logits, V, BLOCK, *arguments, **self.constants)
        return sums

    def write(self, scale: Tensor, shift: Tensor, ce_scale: Tensor | None, ce_shift: Tensor | None) -> None:
        """See the protocol: one read, one write."""
        logits, V = self.logits, self.logits.shape[1]
        rows = [self._as_read(values) for values in (scale, shift, ce_scale, ce_shift)]
        arguments = logits, logits.stride(0), V, *rows
        _launch(triton_kernels.topk_write_kernel, logits, V, BLOCK, *arguments, **self.constants)


class TritonFull(_Block, FullPass):
    """See ``FullPass``. The teacher's block is left as it was."""

    def __init__(self, logits: Tensor, scaling: Scaling, teacher_logits: Tensor, teacher_scaling: Scaling) -> None:
        super().__init__(logits, scaling)
        self.teacher = _checked(teacher_logits)
        if (logits.shape, logits.dtype) != (teacher_logits.shape, teacher_logits.dtype):
            raise ValueError(
                f"student and teacher logits must be alike: {tuple(logits.shape)} of {logits.dtype}, "
                f"{tuple(teacher_logits.shape)} of {teacher_logits.dtype}"
            )
        self.constants["TEACHER_TEMPERATURE"] = teacher_scaling.temperature
        self.constants["TEACHER_SOFTCAP"] = teacher_scaling.softcap
        self.blocks = logits, logits.stride(0), teacher_logits, teacher_logits.stride(0), logits.shape[1]

    def sums(self, divergence: Divergence, with_ce: bool) -> PairSums:
        """See the protocol; the reference r is u − z at the first column."""
        logits, V = self.logits, self.logits.shape[1]
        crosses = divergence.expectation != "exchanged"
        if V == 0:
            student, none = _no_sums(logits, with_ce), logits.new_zeros(logits.shape[:1])
            return PairSums(student, _no_sums(logits, False), student.highest, none, none if crosses else None)
        student = RowSums(self._empty(), self._empty(), self._empty() if with_ce else None)
        teacher = RowSums(self._empty(), self._empty(), None)
        sums = PairSums(student, teacher, self._empty(), self._empty(), self._empty() if crosses else None)
        arguments = *self.blocks, *student, *teacher[:2], *sums[2:]
        constants = {**self.constants, "DIVERGENCE": divergence.name}
        _launch(triton_full_kernels.full_sums_kernel, logits, V, PAIR_BLOCK, *arguments, **constants)
        return sums

    def values(self, divergence: Divergence, lse_z: Tensor, lse_u: Tensor) -> tuple[Tensor, Tensor]:
        """See the protocol: one read of both."""
        logits, V = self.logits, self.logits.shape[1]
        d, u = logits.new_zeros(2, logits.shape[0])
        arguments = *self.blocks, self._as_read(lse_z), self._as_read(lse_u), d, u
        constants = {**self.constants, "DIVERGENCE": divergence.name, "BETA": divergence.beta}
        _launch(triton_full_kernels.full_values_kernel, logits, V, PAIR_BLOCK, *arguments, **constants)
        return d, u

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
        """See the protocol: one read of both, one write."""
        logits, V = self.logits, self.logits.shape[1]
        rows = [self._as_read(values) for values in (lse_z, lse_u, expectation, scale, ce_scale, ce_shift)]
        constants = {**self.constants, "DIVERGENCE": divergence.name, "BETA": divergence.beta}
        _launch(triton_full_kernels.full_write_kernel, logits, V, PAIR_BLOCK, *self.blocks, *rows, **constants)


def _no_sums(logits: Tensor, with_ce: bool) -> RowSums:
    """The sums over a shard without columns."""
    none = logits.new_zeros(logits.shape[:1])
    return RowSums(torch.full_like(none, -torch.inf), none, none if with_ce else None)


class TritonPasses:
    """See ``Passes``."""

    name = "triton"
    keeps_slope = False
    in_blocks = False

    def topk(self, logits: Tensor, scaling: Scaling) -> TritonTopK:
        """See the protocol."""
        return TritonTopK(logits, scaling)

    def full(self, logits: Tensor, scaling: Scaling, teacher_logits: Tensor, teacher_scaling: Scaling) -> TritonFull:
        """See the protocol."""
        return TritonFull(logits, scaling, teacher_logits, teacher_scaling)
