"""Probabilities of a row at the cache's temperatures, and the proof that they add up to one.

Legend: L positions, K slots, T0 the first temperature of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_kd.cache.row import Row
from megatron_kd.cache.values import ROUNDING
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
    """Refuses a row whose probabilities and tail do not add up to one, at any of its temperatures.

    A log-probability ℓ rounded with relative error r moves its probability p by p·|ℓ|·r, and at T by p_T·|ℓ|·r·T0/T:
    the sum over a position may be off by r·Σ p|ℓ|·T0/T and by the float32 arithmetic of the teacher, never by more.

    Args:
        stride: check every ``stride``-th position. A few are enough to see a wrong temperature or tail.

    Raises:
        CacheError: naming sample, position, temperature and sum.
    """
    for temperature in temperatures:
        logprobs, tail = at_temperature(row, temperatures, temperature)
        p = np.exp(logprobs[::stride])
        mass = p.sum(-1, dtype="<f8") + np.exp(tail[::stride])
        # Where p is 0 (ℓ = −inf) the product has no value; its limit is 0.
        size = -np.maximum(row.logprobs[::stride].astype("<f4"), -1e4) * np.float32(temperatures[0] / temperature)
        tolerance = _TEACHER_TOLERANCE + 1.01 * ROUNDING[value_dtype] * (p * size).sum(-1, dtype="<f8")
        wrong = ~(np.abs(mass - 1) <= tolerance)
        if wrong.any():
            where = int(wrong.argmax())
            raise CacheError(
                f"sample {row.sample_id} is not a row of this cache: at temperature {temperature:g} the probabilities "
                f"and the tail of position {where * stride} add up to {mass[where]:.5f}, "
                f"must be 1 within {tolerance[where]:.1g}"
            )
