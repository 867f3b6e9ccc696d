"""What storing the top K loses, against whole distributions written out in numpy and against the losses' gradients.

c rows, V vocabulary, K kept.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_kd.cache.values import VALUE_DTYPES
from megatron_kd.losses import TAILS, dense_full_divergence, dense_topk_divergence, peak_extra_bytes
from megatron_kd.losses.collectives import TensorParallelGroup
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.fidelity import BUFFERS, k_ladder
from megatron_kd.teacher.fidelity_cache import RowFidelity, worst_of
from megatron_kd.teacher.fidelity_report import FidelitySums
from megatron_kd.teacher.fidelity_rows import (
    FORMS,
    SUBTRACTED,
    DenseRows,
    compare,
    dense_log_probs,
    first_k,
    rounded,
    stored_tail,
)

ALONE = TensorParallelGroup(None)
Array = np.ndarray[Any, np.dtype[np.float64]]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def round_values(values: Array, value_dtype: str) -> Array:
    """The nearest values of a type; of bfloat16 by torch's own conversion."""
    if value_dtype == "bfloat16":
        return torch.from_numpy(values.astype(np.float32)).bfloat16().double().numpy()
    return values.astype(np.float32).astype(value_dtype).astype(np.float64)


def oracle(log_p: Array, log_q: Array, k: int, value_dtype: str | None, form: str) -> tuple[Array, Array, Array, Array]:
    """(KL, loss, ‖Δ dz‖², dz [c, V]) of each row, every distribution a vector over the vocabulary.

    Without a ``value_dtype`` nothing is rounded and the tail is the exact one.
    """
    kls, losses, errors, gradients = [], [], [], []
    for lp, lq in zip(log_p, log_q, strict=True):
        order = np.argsort(-lp, kind="stable")
        inside, outside = order[:k], order[k:]
        p, q = np.exp(lp), np.exp(lq)
        r = np.exp(lp[inside] if value_dtype is None else round_values(lp[inside], value_dtype))
        tail = float(p[outside].sum())
        if len(outside) and value_dtype is not None:
            tail = float(np.exp(np.float64(np.float32(np.log(tail)))))
        if form == SUBTRACTED and len(outside) and value_dtype is not None:
            tail = max(0.0, 1.0 - r.sum())
        if form.startswith("renormalize"):
            r, tail = r / r.sum(), 0.0
        elif form == "truncate":
            tail = 0.0
        stored, student = np.zeros_like(p), q.copy()
        stored[inside] = r
        if form == "renormalize_both":
            student[outside] = 0.0
            student /= student.sum()
        # The tail as one outcome: teacher and student give it their masses, in the student's proportions.
        if len(outside):
            stored[outside] = tail * q[outside] / q[outside].sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            kl = np.where(p > 0, p * (lp - np.log(stored)), 0.0).sum() - p.sum() + stored.sum()
            loss = np.where(stored > 0, stored * (np.log(stored) - np.log(student)), 0.0).sum()
        gradient = stored.sum() * student - stored
        kls.append(kl)
        losses.append(loss)
        errors.append(((gradient - (q - p)) ** 2).sum())
        gradients.append(gradient)
    return np.array(kls), np.array(losses), np.array(errors), np.array(gradients)


def draw(seed: int, rows: int, vocab: int, scale: float) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, scale, (rows, vocab))
    return log_softmax(logits), log_softmax(logits + generator.normal(0, 0.7, (rows, vocab)))


def dense_rows(log_p: Array, log_q: Array) -> tuple[DenseRows, Tensor]:
    """The rows, and all ids in descending order of probability."""
    ids = np.argsort(-log_p, axis=1, kind="stable").astype(np.int32)
    return DenseRows(torch.from_numpy(log_p), torch.from_numpy(log_q), 0, ALONE), torch.from_numpy(ids)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(2, 40),
    kept=st.floats(0, 1),
    scale=st.sampled_from([0.3, 2.0, 6.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_whole_distributions_in_numpy(rows: int, vocab: int, kept: float, scale: float, seed: int) -> None:
    k = 1 + round(kept * (vocab - 1))
    log_p, log_q = draw(seed, rows, vocab, scale)
    dense, ids = dense_rows(log_p, log_q)
    p, q = np.exp(log_p), np.exp(log_q)
    np.testing.assert_allclose(dense.kl, (p * (log_p - log_q)).sum(1), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(dense.gradient_norm2, ((q - p) ** 2).sum(1), rtol=1e-10, atol=1e-20)
    seen = first_k(dense.keep(ids), k)
    np.testing.assert_allclose(seen.outside.p, np.sort(p, axis=1)[:, : vocab - k].sum(1), rtol=1e-9, atol=1e-300)
    for dtype in VALUE_DTYPES:
        log_r = rounded(seen.log_p, dtype)
        for form in FORMS:
            lost = compare(seen, log_r, stored_tail(seen, log_r, form), form)
            kl, loss, error2, gradient = oracle(log_p, log_q, k, dtype, form)
            rounding = gradient - oracle(log_p, log_q, k, None, form)[3]
            if k == vocab or form != SUBTRACTED:  # where 1 − Σ is exactly 0 hangs on the order of the sum
                assert np.array_equal(np.isinf(lost.kl), np.isinf(kl)), (dtype, form)
                finite = np.isfinite(kl)
                np.testing.assert_allclose(lost.kl.numpy()[finite], kl[finite], rtol=1e-6, atol=1e-13)
            np.testing.assert_allclose(lost.loss, loss, rtol=1e-8, atol=1e-12, err_msg=f"{dtype} {form}")
            np.testing.assert_allclose(lost.gradient_error2, error2, rtol=1e-6, atol=1e-16, err_msg=f"{dtype} {form}")
            np.testing.assert_allclose(lost.rounding_error2, (rounding**2).sum(1), rtol=1e-6, atol=1e-25)
            assert (lost.kl > -1e-30).all(), "a divergence"


@pytest.mark.parametrize("form", list(FORMS))
def test_the_gradient_is_that_of_the_losses(form: str) -> None:
    """An identity for a head turns the losses' hidden states into logits; their gradient comes from autograd."""
    vocab, k = 25, 6
    log_p, log_q = draw(3, 4, vocab, 2.0)
    dense, ids = dense_rows(log_p, log_q)
    seen = first_k(dense.keep(ids), k)
    log_r = rounded(seen.log_p, "bfloat16")
    tail = stored_tail(seen, log_r, form)
    logits = torch.from_numpy(log_q).clone().requires_grad_()
    eye, ones = torch.eye(vocab, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    name = "bucket" if form == SUBTRACTED else form
    assert name in TAILS
    stored = dense_topk_divergence(logits, eye, TopKTargets(ids[:, :k], log_r, tail), ones, tail=name, vocab_size=vocab)
    (ours,) = torch.autograd.grad(stored.loss.sum(), logits)
    full = dense_full_divergence(logits, eye, torch.from_numpy(log_p), eye, ones, vocab_size=vocab)
    (theirs,) = torch.autograd.grad(full.loss.sum(), logits)
    lost = compare(seen, log_r, tail, form)
    torch.testing.assert_close(lost.loss, stored.loss_per_token.double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dense.kl, full.loss_per_token.double(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lost.gradient_error2, (ours - theirs).square().sum(dim=1), rtol=1e-8, atol=1e-14)


def figures(log_p: Array, log_q: Array, ks: list[int]) -> dict[tuple[int, str, str], dict[str, Any]]:
    dense, ids = dense_rows(log_p, log_q)
    sums = FidelitySums(ks, torch.device("cpu"))
    sums.add(dense, ids, torch.ones(len(log_p), dtype=torch.bool))
    return {(row["top_k"], row["value_dtype"], row["tail"]): row for row in sums.results()}


def test_everything_kept_in_float32_loses_nothing() -> None:
    vocab = 60
    found = figures(*draw(5, 7, vocab, 3.0), [10, vocab])
    for form in FORMS:
        row = found[vocab, "float32", form]
        assert row["teacher_mass"] == pytest.approx(1.0, abs=1e-12)
        assert row["gradient_error"] < 1e-5
        if form != SUBTRACTED:
            assert row["kl_infinite"] == 0 and 0 <= row["kl"] < 1e-12
    assert found[10, "float32", "bucket"]["kl"] > 1e-4


def test_more_ids_lose_less() -> None:
    ks = [1, 2, 5, 10, 20, 50, 100, 200]
    found = figures(*draw(6, 12, 200, 2.0), ks)
    for smaller, larger in itertools.pairwise(ks):
        less, more = (found[k, "float32", "bucket"] for k in (smaller, larger))
        # A finer partition of the vocabulary: the teacher's mass and the divergence it sees can only grow.
        assert more["teacher_mass"] > less["teacher_mass"]
        assert more["kl"] < less["kl"] and more["loss"] > less["loss"]
        assert more["gradient_error"] < less["gradient_error"]
    for k in ks[:-1]:
        # A flat tail: the bucket keeps what truncation throws away.
        assert found[k, "float32", "bucket"]["gradient_error"] < found[k, "float32", "truncate"]["gradient_error"]
        for form in ("truncate", "renormalize_teacher", "renormalize_both"):
            assert found[k, "float32", form]["kl"] is None and found[k, "float32", form]["kl_infinite"] == 1.0


def test_coarser_values_lose_more_and_subtraction_the_tail() -> None:
    """A sharp teacher: little lies outside, and 1 − Σ of rounded values is rounding."""
    found = figures(*draw(7, 50, 300, 6.0), [100])
    dtypes = ("float32", "float16", "bfloat16")
    for name in ("gradient_error", "rounding_error"):
        errors = [found[100, dtype, "bucket"][name] for dtype in dtypes]
        assert errors[0] < errors[1] < errors[2]
    kls = [found[100, dtype, "bucket"]["kl"] for dtype in dtypes]
    assert kls[0] < kls[1] < kls[2]
    assert found[100, "float16", SUBTRACTED]["kl_infinite"] > 0.2, "a rounded sum above 1 leaves no tail"
    assert found[100, "float16", "bucket"]["kl_infinite"] == 0


def test_masked_rows_do_not_count() -> None:
    log_p, log_q = draw(8, 6, 40, 2.0)
    dense, ids = dense_rows(log_p, log_q)
    counted = torch.tensor([True, False, True, True, False, True])
    part = FidelitySums([3, 40], torch.device("cpu"))
    part.add(dense, ids, counted)
    assert part.tokens == 4
    alone = figures(log_p[counted.numpy()], log_q[counted.numpy()], [3, 40])
    for row in part.results():
        expected = alone[row["top_k"], row["value_dtype"], row["tail"]]
        assert (row["kl"] is None) == (expected["kl"] is None)
        for name in ("teacher_mass", "kl", "kl_infinite", "loss", "gradient_error", "rounding_error"):
            assert row[name] is None or row[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-15), name


def test_a_student_equal_to_the_teacher_has_no_gradient_to_compare_with() -> None:
    log_p, _ = draw(9, 3, 20, 2.0)
    assert all(row["gradient_error"] is None for row in figures(log_p, log_p, [4]).values())


def test_dense_log_probs_project_in_float64() -> None:
    hidden, head = torch.randn(3, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    exact = torch.log_softmax(hidden.double() @ head.double().t() / 3.0, dim=1)
    torch.testing.assert_close(dense_log_probs(hidden, head, 1.5, ALONE, 2.0), exact, rtol=1e-13, atol=1e-13)


def test_memory_is_a_few_matrices_of_a_chunk() -> None:
    """What the job divides its budget by, ``BUFFERS`` float32 matrices [c, V], is what a chunk really takes."""
    rows, vocab, k = 24, 6000, 10
    hidden, head = torch.randn(rows, 8), torch.randn(vocab, 8)
    ids = torch.randint(0, vocab, (rows, k), dtype=torch.int32)

    def chunk() -> None:
        log_p, log_q = (dense_log_probs(hidden, head, 1.0, ALONE, softened) for softened in (1.0, 2.0))
        dense = DenseRows(log_p, log_q, 0, ALONE)
        FidelitySums([1, k], torch.device("cpu")).add(dense, ids, torch.ones(rows, dtype=torch.bool))

    with torch.no_grad():
        seen = peak_extra_bytes(chunk)
    assert 8 * rows * vocab < seen < BUFFERS * 4 * rows * vocab + (1 << 20), seen / (4 * rows * vocab)


@pytest.mark.parametrize(
    ("top_k", "vocab", "expected"),
    [
        (20, 1003, [1, 2, 5, 10, 20, 50, 100, 200]),
        (100, 201_088, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (64, 100, [1, 2, 5, 10, 20, 50, 64, 100]),
        (7, 7, [1, 2, 5, 7]),
        (1, 3, [1, 2, 3]),
    ],
)
def test_the_ladder_of_k(top_k: int, vocab: int, expected: list[int]) -> None:
    assert k_ladder(top_k, vocab) == expected


def cached(log_p: Array, k: int) -> tuple[DenseRows, Tensor, TopKTargets]:
    """Dense rows and the targets that a faultless float16 cache has of them."""
    dense, ids = dense_rows(log_p, log_p)
    seen = dense.keep(ids[:, :k])
    values = torch.from_numpy(seen.log_p.numpy().astype(np.float16))
    return dense, ids, TopKTargets(ids[:, :k].clone(), values, seen.outside.p.log().float())


def checked(log_p: Array, change: Any) -> RowFidelity:
    dense, ids, targets = cached(log_p, 8)
    change(targets)
    return RowFidelity.of(4, 100, dense, ids, targets, 2.0**-11)


def test_a_faultless_cached_row_is_at_its_rounding() -> None:
    row = checked(draw(10, 9, 50, 2.0)[0], lambda targets: None)
    assert row.error < 1e-6 and row.ids_moved == 0


def swap_ids(targets: TopKTargets) -> None:
    targets.ids[5, [0, 7]] = targets.ids[5, [7, 0]]


def lower_value(targets: TopKTargets) -> None:
    targets.logprobs[5, 3] -= 0.5


def raise_tail(targets: TopKTargets) -> None:
    targets.tail_logmass[5] += 0.25


def spoil_value(targets: TopKTargets) -> None:
    targets.logprobs[5, 2] = math.nan


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (swap_ids, "rank_error"),
        (lower_value, "logprob_error"),
        (raise_tail, "tail_error"),
        (spoil_value, "logprob_error"),
    ],
)
def test_a_wrong_place_of_a_cached_row_is_found(change: Any, field: str) -> None:
    log_p = draw(10, 9, 50, 2.0)[0]
    row = checked(log_p, change)
    assert row.position == 105 and row.error > 0.2
    assert getattr(row, field) == pytest.approx(row.error, rel=1e-9) or field == "rank_error"
    good = checked(log_p, lambda targets: None)
    both = worst_of([good, row])
    assert (both.sample, both.position, both.error) == (4, 105, row.error)
    assert row.ids_moved == (2 if change is swap_ids else 0)


def test_unused_slots_are_no_error() -> None:
    """Targets of another program may keep fewer ids at some positions."""

    def keep_six(targets: TopKTargets) -> None:
        left = torch.logsumexp(targets.logprobs[:, 6:].double(), dim=1)
        targets.tail_logmass.copy_(torch.logaddexp(targets.tail_logmass.double(), left))
        targets.ids[:, 6:] = -1
        targets.logprobs[:, 6:] = -math.inf

    row = checked(draw(11, 9, 50, 2.0)[0], keep_six)
    assert row.error < 1e-2 and row.ids_moved == 0


def test_ids_that_tie_may_trade_places() -> None:
    log_p = log_softmax(np.array([[3.0, 1.0, 1.0, 0.5, 0.2, 0.1, 0.0, -0.5, -0.7, -1.0]]))

    def swap(targets: TopKTargets) -> None:
        targets.ids[0, [1, 2]] = targets.ids[0, [2, 1]]

    row = checked(log_p, swap)
    assert row.ids_moved == 2 and row.error < 1e-6
