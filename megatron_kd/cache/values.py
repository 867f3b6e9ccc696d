"""Log-probabilities as differences of their bit patterns.

A row's values are ≤ 0 and descend, so their floating-point bit patterns (sign bit set, magnitude growing) ascend as
unsigned integers. The difference of each pattern from the one before it is a small number; differences and cumulative
sums modulo 2^bits are exact for every input, so −inf and even unordered values come back bit for bit.
"""

from __future__ import annotations

import numpy as np

# name in cache.json → numpy type of the bit patterns
_PATTERN: dict[str, np.dtype] = {"float16": np.dtype("<u2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<u4")}
VALUE_DTYPES = tuple(_PATTERN)
# Half a unit in the last place, relative to the value: 2^−(mantissa bits + 1).
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Half the smallest number, for values so near 0 that they have fewer digits.
SUBNORMAL_ROUNDING = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
# What is below it becomes −inf.
LOWEST = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": -3.4028234663852886e38}


def pattern_dtype(value_dtype: str) -> np.dtype:
    """The unsigned type of the stored differences."""
    return _PATTERN[value_dtype]


def to_patterns(logprobs: np.ndarray, value_dtype: str) -> np.ndarray:
    """float16 or float32 [...] → bit patterns of the stored type, rounded to nearest even where it is narrower."""
    if value_dtype == "float16":
        with np.errstate(over="ignore"):  # below −65504 a probability is zero: −inf is its value
            return np.ascontiguousarray(logprobs, "<f2").view("<u2")
    bits = np.ascontiguousarray(logprobs, "<f4").view("<u4")
    if value_dtype == "float32":
        return bits
    # No overflow beyond −inf: the addition carries from mantissa to exponent, which is the rounding up to −inf.
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def from_patterns(patterns: np.ndarray, value_dtype: str) -> np.ndarray:
    """Bit patterns → float16 (float16), float32 (float32 and bfloat16, exactly)."""
    if value_dtype == "float16":
        return patterns.view("<f2")
    if value_dtype == "float32":
        return patterns.view("<f4")
    return (patterns.astype("<u4") << np.uint32(16)).view("<f4")


def delta_encode(patterns: np.ndarray) -> np.ndarray:
    """[..., K] → [..., K]: the first pattern, then each one minus its predecessor, modulo 2^bits."""
    deltas = patterns.copy()
    deltas[..., 1:] -= patterns[..., :-1]
    return deltas


def delta_decode(deltas: np.ndarray) -> np.ndarray:
    """The inverse of ``delta_encode``: a cumulative sum modulo 2^bits along the last dimension."""
    return np.cumsum(deltas, axis=-1, dtype=deltas.dtype)
