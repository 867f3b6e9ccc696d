"""Ids ↔ ranks and log-probabilities ↔ bit differences come back exactly, for anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_kd.cache.identity import first_difference, row_hash
from megatron_kd.cache.rank_table import IdCoding, build_rank_table, check_rank_table, rank_table_hash
from megatron_kd.cache.values import delta_decode, delta_encode, from_patterns, to_patterns
from megatron_kd.errors import CacheError

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, max_side=24)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40))
def test_rank_table_sorts_by_count_then_id(counts: list[int]) -> None:
    table = build_rank_table(np.array(counts, "u8"))
    by_hand = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    assert [by_hand.index(token) for token in range(len(counts))] == table.tolist()
    check_rank_table(table, len(counts))


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.lists(st.integers(-1, 3), max_size=30))
def test_rank_table_puts_scored_ids_first(counts: list[int], scored: list[int]) -> None:
    table = build_rank_table(np.array(counts), np.array(scored, "i4").reshape(-1, 1))
    by_hand = sorted(range(len(counts)), key=lambda token: (-scored.count(token), -counts[token], token))
    assert [by_hand.index(token) for token in range(len(counts))] == table.tolist()


@settings(max_examples=40)
@given(st.data(), st.sampled_from([1, 2, 131_073, 201_088, 2**20]))
def test_ids_round_trip(data: st.DataObject, vocab_size: int) -> None:
    table = np.random.default_rng(vocab_size).permutation(vocab_size).astype("u4")
    extremes = st.sampled_from([-1, 0, vocab_size - 1])
    ids = data.draw(hnp.arrays("i4", SHAPES, elements=extremes | st.integers(-1, vocab_size - 1)))
    coding = IdCoding(table)
    ranks = coding.encode(ids)
    assert ranks.dtype == np.uint32
    for token, rank in zip(ids.flat, ranks.flat, strict=True):
        assert rank == (0xFFFFFFFF if token < 0 else table[token])
    assert np.array_equal(coding.decode(ranks), ids)


def test_foreign_ids_and_ranks_are_refused() -> None:
    coding = IdCoding(build_rank_table(np.arange(10)))
    for wrong in (-2, 10):
        with pytest.raises(ValueError, match="ids must lie in"):
            coding.encode(np.array([[0, wrong]], "i4"))
    for rank in (10, 0xFFFFFFFE):
        with pytest.raises(ValueError, match=f"rank {rank} does not exist"):
            coding.decode(np.array([[0, rank, 0xFFFFFFFF]], "u4"))
    with pytest.raises(CacheError, match="not a permutation"):
        check_rank_table(np.array([0, 2, 2], "u4"), 3)
    with pytest.raises(ValueError, match="id 1 is"):
        build_rank_table(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"scored_ids must lie in \[-1, 2\), not \[0, 2\]"):
        build_rank_table(np.array([3, 1]), np.array([[0, -1, 2]]))


def _descending(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Any bit patterns → values that are ≤ 0 (both zeros and −inf among them) and descend."""
    values = bits.view(dtype)
    return -np.sort(np.where(np.isnan(values), np.inf, np.abs(values)).astype(dtype), -1)


@given(st.data(), st.sampled_from(["float16", "float32"]))
def test_logprobs_round_trip(data: st.DataObject, dtype: str) -> None:
    unsigned = "u2" if dtype == "float16" else "u4"
    infinite = np.array(-np.inf, dtype).view(unsigned).item()
    bits = data.draw(hnp.arrays(unsigned, SHAPES, elements=hnp.from_dtype(np.dtype(unsigned)) | st.just(infinite)))
    logprobs = _descending(bits, dtype)
    patterns = to_patterns(logprobs, dtype)
    decoded = from_patterns(delta_decode(delta_encode(patterns)), dtype)
    assert decoded.dtype == logprobs.dtype
    assert decoded.tobytes() == logprobs.tobytes()
    # Between −0 (which every value here is at most) and −inf the patterns ascend: that makes differences small.
    ascending = patterns.astype("i8")
    assert (np.diff(ascending, axis=-1) >= 0).all()


@given(hnp.arrays("u2", SHAPES))
def test_differences_are_exact_even_without_order(patterns: np.ndarray) -> None:
    before = patterns.copy()
    assert np.array_equal(delta_decode(delta_encode(patterns)), patterns)
    assert np.array_equal(patterns, before)


@given(hnp.arrays("u4", SHAPES))
def test_bfloat16_rounds_as_torch_does(bits: np.ndarray) -> None:
    logprobs = _descending(bits, "float32")
    stored = from_patterns(to_patterns(logprobs, "bfloat16"), "bfloat16")
    assert np.array_equal(stored, torch.from_numpy(logprobs).bfloat16().float().numpy())
    again = from_patterns(to_patterns(stored, "bfloat16"), "bfloat16")
    assert again.tobytes() == stored.tobytes()


def test_float32_is_rounded_to_float16_to_nearest_even() -> None:
    logprobs = np.array([[-0.1, -1.00048828125, -3.3333333, -1e6, -np.inf]], "f4")
    wanted = torch.from_numpy(logprobs).half().numpy()
    assert from_patterns(to_patterns(logprobs, "float16"), "float16").tobytes() == wanted.tobytes()


def test_row_hash_is_the_documented_one() -> None:
    tokens, documents = np.array([5, 7, 9]), np.array([0, 2])
    by_hand = b"".join(number.to_bytes(4, "little") for number in (1, 5, 7, 9, 0, 2))
    assert row_hash(tokens, documents) == xxhash.xxh3_128(by_hand).digest()
    assert row_hash(tokens.astype("i4"), documents.astype("i4")) == row_hash(tokens, documents)
    # A strided view hashes as its values do.
    assert row_hash(np.repeat(tokens, 2)[::2], documents) == row_hash(tokens, documents)
    for other in ((np.array([5, 7, 10]), documents), (tokens, np.array([0, 1])), (tokens, np.array([0]))):
        assert row_hash(*other) != row_hash(tokens, documents)
    with pytest.raises(ValueError, match="tokens must be integers in one dimension"):
        row_hash(np.zeros(3), documents)


def test_rank_table_hash_depends_on_values_alone() -> None:
    table = np.arange(7)
    assert rank_table_hash(table) == rank_table_hash(table.astype("u4"))
    assert rank_table_hash(table) != rank_table_hash(table[::-1])


def test_first_difference() -> None:
    a = np.array([1, 2, 3])
    assert first_difference(a, a) is None
    assert first_difference(a, np.array([1, 5, 3])) == 1
    assert first_difference(a, a[:2]) == first_difference(a[:2], a) == 2
