# Triton reads the annotations of a kernel's arguments: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels over a block of student logits beside a block of teacher logits, both [n, V].

n rows, V columns of this shard. z of the student and u of the teacher from raw logits x and t, each with its own
temperature and soft-cap; q = exp(z − lse_z), p = exp(u − lse_u). One program per row, as in triton_kernels.py.

Bytes by kernel, s = 4 for float32: the sums and the values read 2·s·n·V each, the write reads 2·s·n·V and writes
s·n·V. For two blocks of [1024 × 128,256] in float32 that is 1.05, 1.05 and 1.58 GB: 0.22, 0.22 and 0.33 ms at
4.8 TB/s (H200), 0.31, 0.31 and 0.47 ms at 3.35 TB/s (H100). Computed bounds, not measurements.
"""

import math

import triton
import triton.language as tl

from megatron_kd.losses.divergences import JSD_LARGEST
from megatron_kd.losses.triton_kernels import (
    expm1,
    finite_or_zero,
    log1p,
    scaled,
    this_row,
    times_slope,
)

LARGEST = tl.constexpr(JSD_LARGEST)


@triton.constexpr_function
def minus_log(beta):
    """−log β, at compile time."""
    return -math.log(beta)


@triton.jit
def pair_terms(log_p, log_q, DIVERGENCE: tl.constexpr, BETA: tl.constexpr):
    """(d, u) of divergences.py, by the formulas there; 0 where both probabilities are 0."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if DIVERGENCE == "forward_kl":
        d = tl.where(p != 0.0, p * (log_p - log_q), 0.0)
        u = -p
    elif DIVERGENCE == "reverse_kl":
        d = tl.where(q != 0.0, q * (log_q - log_p), 0.0)
        u = d
    elif DIVERGENCE == "jsd":
        # Where both are 0, r is NaN and no term takes it.
        r = log_p - log_q
        limited = tl.minimum(r, LARGEST)
        log_m_q = log1p(expm1(limited) * BETA, tl.exp(limited) * BETA + (1.0 - BETA))
        log_q_m = -tl.where(r > LARGEST, r - minus_log(BETA), log_m_q)
        log_p_m = tl.where(p != 0.0, r + log_q_m, 0.0)
        # q = 0 gives ∞ − ∞ there.
        log_p_m = tl.where(r == float("inf"), minus_log(BETA), log_p_m)
        u = tl.where(q != 0.0, q * log_q_m, 0.0) * (1.0 - BETA)
        d = p * log_p_m * BETA + u
    else:
        tl.static_assert(DIVERGENCE == "tvd")
        difference = q - p
        d = tl.abs(difference) * 0.5
        sign = tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, difference))
        u = q * sign * 0.5
    return d, u


@triton.jit
def full_sums_kernel(
    x_pointer,
    x_stride,
    t_pointer,
    t_stride,
    V,
    z_highest_pointer,
    z_total_pointer,
    ce_total_pointer,
    u_highest_pointer,
    u_total_pointer,
    best_pointer,
    offset_pointer,
    cross_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_TEMPERATURE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of ``PairSums`` in one read of both blocks; the cross sum of DIVERGENCE where it has one.

    The maxima run along; a sum is rescaled when the maximum that it is relative to grows.
    """
    row = tl.program_id(0)
    x_row = this_row(x_pointer, x_stride)
    t_row = this_row(t_pointer, t_stride)
    dtype = x_pointer.dtype.element_ty
    # The reference for u − z: any finite number would do.
    z_first = scaled(tl.load(x_row), TEMPERATURE, SOFTCAP)
    offset = scaled(tl.load(t_row), TEACHER_TEMPERATURE, TEACHER_SOFTCAP) - z_first
    offset = tl.where(tl.abs(offset) < float("inf"), offset, 0.0)
    z_highest = tl.full((), -float("inf"), dtype)
    u_highest = tl.full((), -float("inf"), dtype)
    best = z_first
    z_total = tl.zeros((BLOCK,), dtype)
    u_total = tl.zeros((BLOCK,), dtype)
    cross = tl.zeros((BLOCK,), dtype)
    ce_total = tl.zeros((BLOCK,), dtype)
    for start in range(0, V, BLOCK):
        lanes = tl.arange(0, BLOCK)
        within = start + lanes < V
        x = tl.load(x_row + start + lanes, mask=within, other=-float("inf"))
        t = tl.load(t_row + start + lanes, mask=within, other=-float("inf"))
        z = scaled(x, TEMPERATURE, SOFTCAP)
        u = scaled(t, TEACHER_TEMPERATURE, TEACHER_SOFTCAP)
        z_higher = tl.maximum(z_highest, tl.max(z, axis=0))
        u_block = tl.max(u, axis=0)
        u_higher = tl.maximum(u_highest, u_block)
        if u_block > u_highest:
            # z of the first largest u, from the lanes: what the maximum of z is compared with to the last bit.
            first = tl.min(tl.where(u == u_block, lanes, BLOCK), axis=0)
            best = tl.sum(tl.where(lanes == first, z, 0.0), axis=0)
        z_shift = finite_or_zero(z_higher)
        u_shift = finite_or_zero(u_higher)
        z_rescale = tl.exp(z_highest - z_shift)
        u_rescale = tl.exp(u_highest - u_shift)
        z_exp = tl.exp(z - z_shift)
        u_exp = tl.exp(u - u_shift)
        z_total = z_total * z_rescale + z_exp
        u_total = u_total * u_rescale + u_exp
        if DIVERGENCE == "forward_kl":
            cross = cross * u_rescale + tl.where(u_exp != 0.0, u_exp * ((u - z) - offset), 0.0)
        elif DIVERGENCE == "reverse_kl":
            cross = cross * z_rescale + tl.where(z_exp != 0.0, z_exp * ((z - u) + offset), 0.0)
        if ce_total_pointer is not None:
            ce_rescale = tl.exp((z_highest - z_shift) * TEMPERATURE)
            ce_total = ce_total * ce_rescale + tl.exp((z - z_shift) * TEMPERATURE)
        z_highest = z_higher
        u_highest = u_higher
    tl.store(z_highest_pointer + row, z_highest)
    tl.store(z_total_pointer + row, tl.sum(z_total, axis=0))
    tl.store(u_highest_pointer + row, u_highest)
    tl.store(u_total_pointer + row, tl.sum(u_total, axis=0))
    tl.store(best_pointer + row, best)
    tl.store(offset_pointer + row, offset)
    if cross_pointer is not None:
        tl.store(cross_pointer + row, tl.sum(cross, axis=0))
    if ce_total_pointer is not None:
        tl.store(ce_total_pointer + row, tl.sum(ce_total, axis=0))


@triton.jit
def full_values_kernel(
    x_pointer,
    x_stride,
    t_pointer,
    t_stride,
    V,
    lse_z_pointer,
    lse_u_pointer,
    d_pointer,
    u_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_TEMPERATURE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per row Σd and Σu over the shard; one read of both blocks."""
    row = tl.program_id(0)
    x_row = this_row(x_pointer, x_stride)
    t_row = this_row(t_pointer, t_stride)
    dtype = x_pointer.dtype.element_ty
    lse_z = tl.load(lse_z_pointer + row)
    lse_u = tl.load(lse_u_pointer + row)
    d_total = tl.zeros((BLOCK,), dtype)
    u_total = tl.zeros((BLOCK,), dtype)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + columns, mask=columns < V, other=-float("inf"))
        t = tl.load(t_row + columns, mask=columns < V, other=-float("inf"))
        log_q = scaled(x, TEMPERATURE, SOFTCAP) - lse_z
        log_p = scaled(t, TEACHER_TEMPERATURE, TEACHER_SOFTCAP) - lse_u
        d, u = pair_terms(log_p, log_q, DIVERGENCE, BETA)
        d_total += d
        u_total += u
    tl.store(d_pointer + row, tl.sum(d_total, axis=0))
    tl.store(u_pointer + row, tl.sum(u_total, axis=0))


@triton.jit
def full_write_kernel(
    x_pointer,
    x_stride,
    t_pointer,
    t_stride,
    V,
    lse_z_pointer,
    lse_u_pointer,
    expectation_pointer,
    scale_pointer,
    ce_scale_pointer,
    ce_shift_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_TEMPERATURE: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x becomes (scale·(u − q·E) + ce_scale·exp(T·z − ce_shift))·dy/dx: one read of both blocks, one write."""
    row = tl.program_id(0)
    x_row = this_row(x_pointer, x_stride)
    t_row = this_row(t_pointer, t_stride)
    lse_z = tl.load(lse_z_pointer + row)
    lse_u = tl.load(lse_u_pointer + row)
    expectation = tl.load(expectation_pointer + row)
    scale = tl.load(scale_pointer + row)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + columns, mask=columns < V, other=-float("inf"))
        t = tl.load(t_row + columns, mask=columns < V, other=-float("inf"))
        z = scaled(x, TEMPERATURE, SOFTCAP)
        log_p = scaled(t, TEACHER_TEMPERATURE, TEACHER_SOFTCAP) - lse_u
        _, u = pair_terms(log_p, z - lse_z, DIVERGENCE, BETA)
        gradient = scale * (u - tl.exp(z - lse_z) * expectation)
        if ce_scale_pointer is not None:
            ce_shift = tl.load(ce_shift_pointer + row)
            gradient += tl.load(ce_scale_pointer + row) * tl.exp(z * TEMPERATURE - ce_shift)
        tl.store(x_row + columns, times_slope(gradient, z, TEMPERATURE, SOFTCAP), mask=columns < V)
