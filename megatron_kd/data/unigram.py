"""The unigram model: what a student scores that knows word frequencies and no context. V vocabulary, K cached."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def fit_unigram(token_counts: NDArray[np.integer], smoothing: float | None = None) -> NDArray[np.float64]:
    """Log-probabilities [V] of a unigram model with additive smoothing: log((c + s) / (Σc + s·V)).

    Args:
        token_counts: how often each token occurs, [V].
        smoothing: s > 0; None takes the s that predicts each token best from all the others (leave-one-out
            likelihood), so that the baseline is as strong as it can be.

    Raises:
        ValueError: for negative counts, for none at all, or for a smoothing that is not positive.
    """
    counts = np.asarray(token_counts, np.float64)
    if counts.ndim != 1 or (counts < 0).any() or not counts.sum() > 0:
        raise ValueError("token_counts must be one-dimensional, not negative and not all zero")
    if smoothing is None:
        smoothing = _leave_one_out_smoothing(counts)
    if not (smoothing > 0 and math.isfinite(smoothing)):
        raise ValueError(f"smoothing must be positive and finite, not {smoothing}")
    return np.log(counts + smoothing) - math.log(counts.sum() + smoothing * len(counts))


def unigram_bucket_kl(
    ids: ArrayLike, logprobs: ArrayLike, tail_logmass: ArrayLike, unigram_logprobs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Forward KL of the teacher's top-K and tail distribution from the unigram, in nats per position: float64 [N].

    Both sides have the same K + 1 outcomes, the K ids and one bucket for all other tokens:
    Σ_k p_k·(log p_k − log q_k) + p_tail·(log p_tail − log q_tail), with q_tail = 1 − Σ_k q_k.

    Args:
        ids: int [N, K], −1 where unused.
        logprobs: float [N, K], natural logarithms, −inf where unused.
        tail_logmass: float [N].
        unigram_logprobs: float64 [V] of ``fit_unigram``.
    """
    ids = np.asarray(ids)
    log_p = np.where(ids >= 0, np.asarray(logprobs, np.float64), -np.inf)
    log_q = np.where(ids >= 0, unigram_logprobs[ids], -np.inf)
    log_p_tail = np.asarray(tail_logmass, np.float64)
    q_tail = np.maximum(1.0 - np.exp(log_q).sum(-1), 0.0)
    with np.errstate(divide="ignore"):
        log_q_tail = np.log(q_tail)
    return _weighted_difference(log_p, log_q).sum(-1) + _weighted_difference(log_p_tail, log_q_tail)


def _weighted_difference(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """p·(log p − log q), zero where p is zero."""
    present = log_p > -np.inf
    difference = np.subtract(log_p, log_q, where=present, out=np.zeros_like(log_p))
    return np.exp(log_p) * difference


def _leave_one_out_smoothing(counts: NDArray[np.float64]) -> float:
    # Σ c·log((c − 1 + s) / (Σc − 1 + s·V)) over a grid fine enough for a baseline (steps of 2 %).
    values, repeats = np.unique(counts[counts > 0], return_counts=True)
    total, V = counts.sum(), len(counts)
    grid = np.geomspace(1e-6, 1e3, 1047)[:, None]
    likelihood = (repeats * values * np.log(values - 1 + grid)).sum(-1) - total * np.log(total - 1 + grid[:, 0] * V)
    return float(grid[np.argmax(likelihood), 0])
