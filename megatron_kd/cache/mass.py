"""Probabilities of a row at the cache's temperatures, and the proof that they add up to one.

Legend: L positions, K slots, T0 the first temperature of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_kd.cache.row import Row
from megatron_kd.cache.values import LOWEST, ROUNDING, SUBNORMAL_ROUNDING
from megatron_kd.errors import CacheError

TAIL_FLOOR = 1e-8
"""The least probability that a tail by subtraction is given; the difference of rounded sums says nothing below it."""
_TEACHER_TOLERANCE = 2e-4  # of float32 exponentials and sums over a vocabulary


def at_temperature(row: Row, temperatures: Sequence[float], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The row's distribution at one of the temperatures it was captured with.

    log p_T(v) = (T0/T)·log p_T0(v) − log_normalizer_T, exact because the normalizer was summed over the vocabulary.

    Args:
        temperatures: the manifest's, T0 first.

    Returns:
        Log-probabilities float32 [L, K] and tail log-mass float32 [L].

    Raises:
        CacheError: for a temperature that was not captured.
    """
    if temperature not in temperatures:
        raise CacheError(
            f"temperature {temperature:g} was not captured, only {', '.join(f'{t:g}' for t in temperatures)}: "
            "capture again with it in teacher.temperatures, or train at one of these"
        )
    e = list(temperatures).index(temperature) - 1
    logprobs = row.logprobs.astype("<f4")
    if e < 0:
        return logprobs, row.tail_logmass
    scaled = logprobs * np.float32(temperatures[0] / temperature) - row.log_normalizers[e][:, None]
    return scaled, row.tail_logmass_extra[e]


def check_mass(row: Row, temperatures: Sequence[float], value_dtype: str, stride: int = 1) -> None:
    """Refuses a row whose probabilities and tail cannot add up to one, at any of its temperatures.

    What was stored for ℓ may be off by ``rounding_error``, so that at T, with q = T0/T and the log-normalizer N, which
    is rounded to float32 itself, log p_T lies within ε = q·rounding_error(ℓ) + 2⁻²⁴·|N| of qℓ − N. The true p_T lie
    between p·e^−ε and p·e^ε and add up to one, hence Σ p·e^−ε ≤ 1 ≤ Σ p·e^ε, but for the float32 arithmetic of the
    teacher. Far below T0 that is no bound any more, and refuses nothing.

    Args:
        stride: check every ``stride``-th position. A few are enough to see a wrong temperature or tail.

    Raises:
        CacheError: naming sample, position, temperature, sum, and what the sum may be.
    """
    for e, temperature in enumerate(temperatures):
        suspects = _suspects(row, temperatures, temperature, value_dtype, stride)
        if not len(suspects):
            continue
        normalizer = row.log_normalizers[e - 1, suspects].astype("<f8") if e else np.zeros(len(suspects))
        tail = (row.tail_logmass_extra[e - 1] if e else row.tail_logmass)[suspects].astype("<f8")
        low, mass, high = _sums(
            row.logprobs[suspects].astype("<f8"),
            row.ids[suspects] >= 0,
            tail,
            normalizer,
            temperatures[0] / temperature,
            value_dtype,
        )
        wrong = ~((low <= 1 + _TEACHER_TOLERANCE) & (high >= 1 - _TEACHER_TOLERANCE))
        if wrong.any():
            where = int(wrong.argmax())
            least, most = 1 - (high - mass)[where] - _TEACHER_TOLERANCE, 1 + (mass - low)[where] + _TEACHER_TOLERANCE
            raise CacheError(
                f"sample {row.sample_id} is not a row of this cache: at temperature {temperature:g} the probabilities "
                f"and the tail of position {suspects[where]} add up to {mass[where]:.8g}, rounding explains "
                f"{max(0.0, least):.8g} to {most:.8g}"
            )


def rounding_error(logprobs: np.ndarray, value_dtype: str) -> np.ndarray:
    """How far a stored log-probability, float64, may be from the teacher's, in nats.

    The teacher's is rounded to float32, then to the stored type: by half a unit in the last place each, which is
    ``ROUNDING`` of the value, and half the smallest number where values are subnormal.
    """
    return np.abs(logprobs) * (ROUNDING[value_dtype] + ROUNDING["float32"]) + SUBNORMAL_ROUNDING[value_dtype]


def _sums(
    logprobs: np.ndarray, used: np.ndarray, tail: np.ndarray, normalizer: np.ndarray, ratio: float, value_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Σ p·e^−ε, Σ p, Σ p·e^ε with the tail, float64 [P], of logprobs [P, K], tails and normalizers [P] in float64."""
    cut = np.isneginf(logprobs)
    finite = np.where(cut, LOWEST[value_dtype], logprobs)
    center = ratio * finite - normalizer[:, None]
    error = ratio * rounding_error(finite, value_dtype) + ROUNDING["float32"] * np.abs(normalizer)[:, None]
    tail_error = ROUNDING["float32"] * np.abs(np.where(np.isneginf(tail), 0.0, tail))
    with np.errstate(over="ignore"):  # infinite is more than one
        low, mass = (np.where(cut, 0.0, np.exp(center - shift)).sum(-1) for shift in (error, 0.0))
        # What lies below the least number of the type became −inf; at a higher temperature it may have counted.
        high = np.where(cut & ~used, 0.0, np.exp(center + error)).sum(-1)
    return low + np.exp(tail - tail_error), mass + np.exp(tail), high + np.exp(tail + tail_error)


def _suspects(row: Row, temperatures: Sequence[float], temperature: float, value_dtype: str, stride: int) -> np.ndarray:
    """Positions that a quick look in float32 does not clear: by e^−ε ≤ 1 − 0.9·ε up to 0.2, and e^ε ≥ 1 + ε."""
    logprobs, tail = at_temperature(row, temperatures, temperature)
    ratio = temperatures[0] / temperature
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(logprobs[::stride])
        mass = p.sum(-1, dtype="<f8") + np.exp(tail[::stride])
        # Where p is 0 (ℓ = −inf) the product has no value; its limit is 0.
        size = -np.maximum(row.logprobs[::stride].astype("<f4"), -1e4)
        error = np.minimum(size * np.float32(ROUNDING[value_dtype] * ratio), np.float32(0.2))
        cleared = np.abs(mass - 1) <= _TEACHER_TOLERANCE / 2 + 0.9 * (p * error).sum(-1, dtype="<f8")
    return np.flatnonzero(~cleared) * stride
