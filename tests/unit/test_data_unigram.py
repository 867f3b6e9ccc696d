"""The unigram baseline against sums over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_kd.data.unigram import fit_unigram, unigram_bucket_kl

V, K, N = 50, 7, 20


def test_fit_is_a_smoothed_frequency() -> None:
    counts = np.array([3, 0, 1, 6])
    np.testing.assert_allclose(np.exp(fit_unigram(counts, 0.5)), np.array([3.5, 0.5, 1.5, 6.5]) / 12, rtol=1e-14)


def test_chosen_smoothing_is_the_best_of_leave_one_out() -> None:
    counts = np.random.default_rng(0).poisson(np.geomspace(20, 0.05, V))

    def leave_one_out(smoothing: float) -> float:
        """By its definition: fit on all tokens but one, score that one."""
        total = 0.0
        for token, count in enumerate(counts):
            if count:
                rest = counts.copy()
                rest[token] -= 1
                total += count * fit_unigram(rest, smoothing)[token]
        return total

    fitted = np.exp(fit_unigram(counts))
    # s from the ratio of an unseen to a seen token: p0/p1 = s/(c + s).
    seen, unseen = int(np.argmax(counts)), int(np.argmin(counts))
    ratio = fitted[unseen] / fitted[seen]
    chosen = counts[seen] * ratio / (1 - ratio)
    best = leave_one_out(chosen)
    assert all(leave_one_out(s) <= best + 1e-9 for s in np.geomspace(0.7, 1.4, 9) * chosen)
    assert all(leave_one_out(s) < best for s in (chosen / 3, chosen * 3))


def teacher(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    logits = np.random.default_rng(seed).normal(size=(N, V)) * 3
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logp, axis=-1)[:, :K].astype(np.int32)
    logprobs = np.take_along_axis(logp, ids, -1)
    return logp, ids, logprobs, np.log(1 - np.exp(logprobs).sum(-1))


def test_bucket_kl_against_the_full_vocabulary() -> None:
    logp, ids, logprobs, tail = teacher(0)
    q = np.exp(fit_unigram(np.random.default_rng(1).integers(0, 40, V), 0.3))
    expected = []
    for n in range(N):
        rest = [v for v in range(V) if v not in ids[n]]
        p_buckets = np.array([*np.exp(logp[n, ids[n]]), np.exp(logp[n, rest]).sum()])
        q_buckets = np.array([*q[ids[n]], q[rest].sum()])
        expected.append(float((p_buckets * np.log(p_buckets / q_buckets)).sum()))
    kl = unigram_bucket_kl(ids, logprobs, tail, np.log(q))
    assert kl.dtype == np.float64 and kl.shape == (N,)
    np.testing.assert_allclose(kl, expected, rtol=1e-10)
    assert (kl > 0).all()


def test_unused_slots_change_nothing() -> None:
    _, ids, logprobs, tail = teacher(2)
    log_q = fit_unigram(np.arange(V))
    padded_ids = np.concatenate([ids, np.full((N, 3), -1, np.int32)], -1)
    padded = np.concatenate([logprobs, np.full((N, 3), -np.inf)], -1)
    np.testing.assert_allclose(
        unigram_bucket_kl(padded_ids, padded, tail, log_q), unigram_bucket_kl(ids, logprobs, tail, log_q), rtol=1e-13
    )


def test_a_teacher_without_tail_and_the_teacher_itself() -> None:
    counts = np.arange(1, V + 1)
    log_q = fit_unigram(counts, 1e-3)
    everything = np.tile(np.arange(V, dtype=np.int32), (2, 1))
    kl = unigram_bucket_kl(everything, np.tile(log_q, (2, 1)), np.full(2, -np.inf), log_q)
    np.testing.assert_allclose(kl, 0, atol=1e-14)
    one_hot = unigram_bucket_kl([[3]], [[0.0]], [-np.inf], log_q)
    np.testing.assert_allclose(one_hot, [-log_q[3]], rtol=1e-14)


@pytest.mark.parametrize("counts", [np.zeros(3, np.int64), np.array([1, -1]), np.ones((2, 2), np.int64)])
def test_bad_counts(counts: np.ndarray) -> None:
    with pytest.raises(ValueError, match="token_counts"):
        fit_unigram(counts)


def test_bad_smoothing() -> None:
    with pytest.raises(ValueError, match="smoothing"):
        fit_unigram(np.ones(3, np.int64), 0.0)
