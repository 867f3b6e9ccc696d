# Triton reads the annotations of a kernel's arguments: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels over a block of student logits [n, V], and the arithmetic that all Triton kernels share.

n rows, V columns of this shard, K columns a row that are treated one by one (cached ids, labels). x are the raw
logits, y = cap·tanh(x/cap) or x, z = y/T. One program per row, V in steps of BLOCK, so no two programs write the same
row and every result is deterministic. x = −inf is a hidden entry: z = −inf and exp(z) = 0 even under a soft-cap.

Bytes by kernel, s = 4 for float32 (8 for float64):

    topk_sums_kernel                reads s·n·V
    topk_write_kernel               reads and writes s·n·V
    take, hide, add                 a few s·n·K, one memory sector an entry

A chunk [1024 × 128,256] in float32 is 525 MB. Sums and write move 1.6 GB: 0.33 ms at 4.8 TB/s (H200), 0.47 ms at
3.35 TB/s (H100). The eager form (maximum, subtract, exp, sum, multiply) moves 4.2 GB. The three GEMMs of such a chunk
at D = 4096 take 4.6 ms at 700 TFLOP/s. Computed bounds, not measurements.

Exponentials live in registers. Besides them a soft-cap and the generalised JSD need two special-function operations an
entry each, few enough for memory to stay the bound. Temperature, soft-cap and β are compile-time constants: they are
those of a run, and a term that does nothing costs nothing. So do arguments that are None, left out of the program.
"""

import triton
import triton.language as tl


@triton.jit
def expm1(x):
    """exp(x) − 1 within a few units in the last place; −1 at −∞.

    Near 0 the Taylor series by Horner's rule, x(1 + x/2(1 + x/3(…))): its remainder is below 2^−26 (float32) or 2^−53
    (float64) of the value for |x| < 0.5. Outside, the subtraction loses less than two bits.
    """
    TERMS: tl.constexpr = 14 if x.dtype == tl.float64 else 8
    series = x * (1.0 / TERMS) + 1.0
    for k in tl.static_range(TERMS - 1, 1, -1):
        series = series * x * (1.0 / k) + 1.0
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x, one_plus_x):
    """log(1 + x) for x > −1, within a few units in the last place; 1 + x is given, with the digits it has near 0.

    Near 0 as 2·artanh(s), s = x/(2 + x): s² ≤ 0.0205 for |x| < 0.25, so that few terms of Σ s^2k/(2k + 1) do.
    """
    TERMS: tl.constexpr = 10 if x.dtype == tl.float64 else 5
    s = x / (x + 2.0)
    square = s * s
    series = square * (1.0 / (2 * TERMS - 1)) + 1.0 / (2 * TERMS - 3)
    for k in tl.static_range(TERMS - 3, -1, -1):
        series = series * square + 1.0 / (2 * k + 1)
    return tl.where(tl.abs(x) < 0.25, 2.0 * s * series, tl.log(one_plus_x))


@triton.jit
def tanh(x):
    """The hyperbolic tangent, −(e − 1)/(e + 1) of e = exp(−2|x|): no digits lost near 0, ±1 at ±∞."""
    less_one = expm1(-2.0 * tl.abs(x))
    positive = -less_one / (less_one + 2.0)
    return tl.where(x < 0.0, -positive, positive)


@triton.jit
def scaled(x, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Raw logits to z; −inf stays −inf."""
    z = x
    if SOFTCAP is not None:
        z = tl.where(x == -float("inf"), x, tanh(x * (1.0 / SOFTCAP)) * (SOFTCAP / TEMPERATURE))
    elif TEMPERATURE != 1.0:
        z = x * (1.0 / TEMPERATURE)
    return z


@triton.jit
def times_slope(values, z, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr):
    """values·dy/dx at z, dy/dx = 1 − (y/cap)²; finite where z is −inf."""
    result = values
    if SOFTCAP is not None:
        y = tl.where(z == -float("inf"), 0.0, z) * (TEMPERATURE / SOFTCAP)
        result = values * (1.0 - y * y)
    return result


@triton.jit
def finite_or_zero(shift):
    """A shift that may be subtracted: −inf − (−inf) would be NaN."""
    return tl.where(shift == -float("inf"), 0.0, shift)


@triton.jit
def this_row(pointer, stride):
    """The pointer to this program's row. The offset is in 64 bits: n·V passes 2^31 in a chunk of 16,745 × 128,256."""
    return pointer + tl.program_id(0).to(tl.int64) * stride


@triton.jit
def topk_sums_kernel(
    x_pointer,
    stride,
    V,
    highest_pointer,
    total_pointer,
    ce_total_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per row: max z, Σexp(z − max), and with CE Σexp(T·(z − max)); one read.

    The maximum runs along: what was summed is rescaled when it grows. The sums are held per lane and reduced at the
    end, which is also what keeps their rounding small.
    """
    row = tl.program_id(0)
    x_row = this_row(x_pointer, stride)
    dtype = x_pointer.dtype.element_ty
    highest = tl.full((), -float("inf"), dtype)
    total = tl.zeros((BLOCK,), dtype)
    ce_total = tl.zeros((BLOCK,), dtype)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + columns, mask=columns < V, other=-float("inf"))
        z = scaled(x, TEMPERATURE, SOFTCAP)
        higher = tl.maximum(highest, tl.max(z, axis=0))
        shift = finite_or_zero(higher)
        total = total * tl.exp(highest - shift) + tl.exp(z - shift)
        if ce_total_pointer is not None:
            ce_total = ce_total * tl.exp((highest - shift) * TEMPERATURE) + tl.exp((z - shift) * TEMPERATURE)
        highest = higher
    tl.store(highest_pointer + row, highest)
    tl.store(total_pointer + row, tl.sum(total, axis=0))
    if ce_total_pointer is not None:
        tl.store(ce_total_pointer + row, tl.sum(ce_total, axis=0))


@triton.jit
def topk_write_kernel(
    x_pointer,
    stride,
    V,
    scale_pointer,
    shift_pointer,
    ce_scale_pointer,
    ce_shift_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x becomes (scale·exp(z − shift) + ce_scale·exp(T·z − ce_shift))·dy/dx: one read and one write.

    A row of which nothing is left (shift −inf) becomes 0.
    """
    row = tl.program_id(0)
    x_row = this_row(x_pointer, stride)
    scale = tl.load(scale_pointer + row)
    shift = finite_or_zero(tl.load(shift_pointer + row))
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + columns, mask=columns < V, other=-float("inf"))
        z = scaled(x, TEMPERATURE, SOFTCAP)
        gradient = scale * tl.exp(z - shift)
        if ce_scale_pointer is not None:
            ce_shift = tl.load(ce_shift_pointer + row)
            gradient += tl.load(ce_scale_pointer + row) * tl.exp(z * TEMPERATURE - ce_shift)
        tl.store(x_row + columns, times_slope(gradient, z, TEMPERATURE, SOFTCAP), mask=columns < V)


@triton.jit
def take_kernel(
    x_pointer,
    stride,
    K,
    columns_pointer,
    owned_pointer,
    z_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z [n, K] at the owned columns, −inf elsewhere. The same arithmetic as in the sums, so that equal is equal."""
    x_row = this_row(x_pointer, stride)
    columns_row = this_row(columns_pointer, K)
    owned_row = this_row(owned_pointer, K)
    z_row = this_row(z_pointer, K)
    for start in range(0, K, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        columns = tl.load(columns_row + slots, mask=slots < K, other=0)
        owned = tl.load(owned_row + slots, mask=slots < K, other=0) != 0
        x = tl.load(x_row + columns, mask=owned, other=-float("inf"))
        tl.store(z_row + slots, scaled(x, TEMPERATURE, SOFTCAP), mask=slots < K)


@triton.jit
def hide_kernel(x_pointer, stride, K, columns_pointer, owned_pointer, BLOCK: tl.constexpr):
    """x becomes −inf at the owned columns."""
    x_row = this_row(x_pointer, stride)
    columns_row = this_row(columns_pointer, K)
    owned_row = this_row(owned_pointer, K)
    hidden = tl.full((BLOCK,), -float("inf"), x_pointer.dtype.element_ty)
    for start in range(0, K, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        columns = tl.load(columns_row + slots, mask=slots < K, other=0)
        owned = tl.load(owned_row + slots, mask=slots < K, other=0) != 0
        tl.store(x_row + columns, hidden, mask=owned)


@triton.jit
def add_kernel(
    x_pointer,
    stride,
    K,
    columns_pointer,
    values_pointer,
    z_pointer,
    TEMPERATURE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x grows by values·dy/dx at the columns, which are distinct where the value is not 0: no atomic additions."""
    x_row = this_row(x_pointer, stride)
    columns_row = this_row(columns_pointer, K)
    values_row = this_row(values_pointer, K)
    z_row = this_row(z_pointer, K)
    for start in range(0, K, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        columns = tl.load(columns_row + slots, mask=slots < K, other=0)
        values = tl.load(values_row + slots, mask=slots < K, other=0.0)
        z = tl.load(z_row + slots, mask=slots < K, other=0.0)
        counted = values != 0.0
        x = tl.load(x_row + columns, mask=counted, other=0.0)
        tl.store(x_row + columns, x + times_slope(values, z, TEMPERATURE, SOFTCAP), mask=counted)
