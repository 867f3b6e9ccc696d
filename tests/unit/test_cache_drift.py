"""The drift between two captures, against sums over dictionaries in pure Python."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.cache.drift import cache_drift, row_drift, teachers_difference
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import make_cache, make_manifest, make_row, rank_table

V = 64


def other(row: Row, noise: float, seed: int, top_k: int, dtype: str = "float32") -> Row:
    """Another teacher on the same tokens: the row's positions with a new random distribution near to it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(row), V)) if noise < 0 else np.full((len(row), V), -6.0)
    if noise >= 0:
        for n in range(len(row)):
            used = row.ids[n] >= 0
            logits[n, row.ids[n][used]] = row.logprobs[n][used]
        logits += rng.normal(0, 1, logits.shape) * noise
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logp, -1, kind="stable")
    with np.errstate(divide="ignore"):
        tail = np.log(np.take_along_axis(np.exp(logp), order[:, top_k:], -1).sum(-1))
    return dataclasses.replace(
        row,
        ids=order[:, :top_k].astype("i4"),
        logprobs=np.take_along_axis(logp, order[:, :top_k], -1).astype(dtype),
        tail_logmass=np.minimum(tail, 0).astype("f4"),
    )


def oracle(a: Row, b: Row, n: int) -> tuple[float, int, list[float]]:
    """KL of position n, ids that only one has, and the differences of the common ones."""
    k = min(a.ids.shape[1], b.ids.shape[1])
    pa, pb = (
        {int(i): float(x) for i, x in zip(r.ids[n, :k], r.logprobs[n, :k], strict=True) if i >= 0} for r in (a, b)
    )
    common = sorted(pa.keys() & pb.keys())
    rests = []
    for row, kept in ((a, pa), (b, pb)):
        every = {int(i): float(x) for i, x in zip(row.ids[n], row.logprobs[n], strict=True) if i >= 0}
        rests.append(
            math.fsum([math.exp(x) for i, x in every.items() if i not in common] + [math.exp(row.tail_logmass[n])])
        )
        assert set(kept) <= set(every)
    p = [math.exp(pa[i]) for i in common] + [rests[0]]
    q = [math.exp(pb[i]) for i in common] + [rests[1]]
    p, q = [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]
    kl = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)
    return kl, max(len(pa), len(pb)) - len(common), [pb[i] - pa[i] for i in common]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 9),
    top_a=st.integers(1, 12),
    top_b=st.integers(1, 12),
    noise=st.sampled_from([-1.0, 0.0, 0.01, 1.0]),
    seed=st.integers(0, 2**31),
    unused=st.booleans(),
)
def test_equals_sums_over_dictionaries(
    length: int, top_a: int, top_b: int, noise: float, seed: int, unused: bool
) -> None:
    a = make_row(seed, length, top_k=top_a, dtype="float32", unused=unused)
    b = other(a, noise, seed, top_b)
    got = row_drift(a, b)
    for n in range(length):
        kl, differing, differences = oracle(a, b, n)
        assert got.kl[n] == pytest.approx(kl, rel=1e-9, abs=1e-12)
        assert got.ids_differing[n] == differing
        np.testing.assert_allclose(got.difference[got.position == n], differences, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(got.same_top1, a.ids[:, 0] == b.ids[:, 0])
    assert (got.kl >= 0).all()


def test_the_kl_of_all_tokens_is_the_full_one() -> None:
    """K = V: nothing is in the bucket, and the lower bound is the KL itself."""
    a = make_row(3, 8, top_k=V, dtype="float32", unused=False)
    b = other(a, -1.0, 3, V)
    dense = [np.zeros((8, V)) for _ in range(2)]
    for full, row in zip(dense, (a, b), strict=True):
        np.put_along_axis(full, row.ids.astype("i8"), row.logprobs.astype("f8"), -1)
    exact = (np.exp(dense[0]) * (dense[0] - dense[1])).sum(-1)
    np.testing.assert_allclose(row_drift(a, b).kl, exact, rtol=1e-5)


def test_what_storage_rounds_is_told_apart() -> None:
    a = make_row(1, 40, dtype="float32", unused=False)
    rounded = dataclasses.replace(a, logprobs=a.logprobs.astype("f2"))
    drift = row_drift(a, rounded, "float32", "float16")
    assert np.abs(drift.difference).max() > 1e-4 and drift.beyond_rounding.max() == 0
    assert drift.kl.max() < 1e-6
    shifted = dataclasses.replace(a, logprobs=a.logprobs - np.float32(0.01))
    assert row_drift(a, shifted).beyond_rounding.min() > 0.0099
    with pytest.raises(ValueError, match="rows of 40 and 39 positions"):
        row_drift(a, make_row(1, 39, dtype="float32"))


def changed_cache(path: Path, rows: list[Row], worst: int, **fields: object) -> Path:
    """A cache of the same rows, but for one position of one."""
    manifest = make_manifest(len(rows), 3, teacher={"name": "teacher", "sha256": "ff"}, **fields)
    cache = create_cache(path, manifest, rank_table())
    logprobs, tail = rows[worst].logprobs.copy(), rows[worst].tail_logmass.copy()
    ids = rows[worst].ids.copy()
    ids[2, :2] = ids[2, 1::-1]  # the two likeliest tokens change places
    rows = [
        *rows[:worst],
        dataclasses.replace(rows[worst], ids=ids, logprobs=logprobs, tail_logmass=tail),
        *rows[worst + 1 :],
    ]
    for shard in range(manifest.shards):
        write_shard(cache, shard, [rows[i] for i in manifest.shard_samples(shard)])
    return path


def test_two_caches(tmp_path: Path) -> None:
    _, rows = make_cache(tmp_path / "a", [7] * 10, 4)
    b = changed_cache(tmp_path / "b", rows, worst=6)
    report = cache_drift(tmp_path / "a", b)
    assert (report.rows, report.positions) == (10, 70)
    assert (report.worst_sample, report.worst_position) == (6, 2)
    assert report.teachers_differ_in == "sha256: '12ab', 'ff'"
    assert report.top1_agreement == pytest.approx(69 / 70) and report.ids_differing_max == 0
    p = np.exp(rows[6].logprobs[2, :2].astype("f8"))
    gap = float(np.log(p[0] / p[1]))
    # Two probabilities that change places: KL (p0 − p1)·log(p0 / p1).
    assert report.kl_max == pytest.approx((p[0] - p[1]) * gap, rel=2e-3)
    assert report.kl_mean == pytest.approx(report.kl_max / 70, rel=1e-6)
    assert report.logprob_max == pytest.approx(gap, rel=1e-6)
    same = cache_drift(tmp_path / "a", tmp_path / "a", rows=3)
    assert (same.rows, same.kl_max, same.logprob_max, same.top1_agreement) == (3, 0.0, 0.0, 1.0)
    assert same.teachers_differ_in is None


def test_the_fields_that_both_teachers_have_are_named_first() -> None:
    hf = {"name": "t", "model_type": "llama", "engine": "hf", "dtype": "fp32"}
    megatron = {"name": "t", "engine": "megatron", "dtype": "fp32"}
    assert teachers_difference(hf, megatron) == "engine: 'hf', 'megatron'"
    assert teachers_difference(hf, {**megatron, "engine": "hf"}) == "model_type: 'llama', None"
    assert teachers_difference(hf, dict(hf)) is None


def test_caches_that_cannot_be_compared(tmp_path: Path) -> None:
    make_cache(tmp_path / "a", [7] * 4, 4)
    for name, fields, words in (
        ("v", {"vocab_size": 70}, "vocabularies are 64 and 70"),
        ("t", {"temperatures": (2.0,)}, "first temperatures are 1 and 2"),
        ("k", {"tokenizer": {"name": "x", "sha256": "0"}}, "tokenizers are None and x"),
    ):
        make_cache(tmp_path / name, [7] * 4, 4, **fields)
        with pytest.raises(CacheError, match=words):
            cache_drift(tmp_path / "a", tmp_path / name)
    make_cache(tmp_path / "longer", [8] * 4, 4)
    with pytest.raises(CacheError, match="made from other tokens"):
        cache_drift(tmp_path / "a", tmp_path / "longer")
    create_cache(tmp_path / "empty", make_manifest(4, 4), rank_table())
    with pytest.raises(CacheError, match="no captured row in common"):
        cache_drift(tmp_path / "a", tmp_path / "empty")
    with pytest.raises(ValueError, match="at least 1"):
        cache_drift(tmp_path / "a", tmp_path / "a", rows=0)
