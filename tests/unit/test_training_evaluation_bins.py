"""Bins of an evaluation: against plain loops, at the edges and between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.training.evaluation_bins import (
    CONFIDENCE_BINS,
    ENTROPY_EDGES,
    confidence_bins,
    entropy_bins,
    position_bins,
    position_ranges,
    sums_by_bin,
    teacher_entropy,
)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 48, 64, 65, 32768, 131072])
def test_every_position_is_in_the_range_of_its_bin(length: int) -> None:
    ranges = position_ranges(length)
    bins = position_bins(torch.arange(length)).tolist()
    spread = [number for number, (first, last) in enumerate(ranges) for _ in range(first, last + 1)]
    assert bins == spread


def test_ranges_are_powers_of_two_up_to_the_end_of_the_row() -> None:
    assert position_ranges(11) == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 10)]
    assert len(position_ranges(32768)) == 16


def test_edges_belong_to_the_bin_that_begins_there_and_confidences_to_the_one_below() -> None:
    entropies = torch.tensor([0.0, *ENTROPY_EDGES, 9.0], dtype=torch.float64)
    assert entropy_bins(entropies).tolist() == [*range(len(ENTROPY_EDGES) + 1), len(ENTROPY_EDGES)]
    just_below = torch.tensor(ENTROPY_EDGES, dtype=torch.float64).nextafter(torch.tensor(0.0, dtype=torch.float64))
    assert entropy_bins(just_below).tolist() == list(range(len(ENTROPY_EDGES)))
    confidences = torch.tensor([1e-30, 1 / 3, 0.334, 0.999, 1.0], dtype=torch.float64)
    assert confidence_bins(confidences).tolist() == [0, 4, 5, CONFIDENCE_BINS - 1, CONFIDENCE_BINS - 1]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 9), k=st.integers(1, 7), unused=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_entropy_is_that_of_the_kept_tokens_and_one_bucket(n: int, k: int, unused: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    p = draw.dirichlet(np.full(k + 1, 0.3), n)
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    expected = [-sum(float(x) * math.log(x) for x in row if x > 0) for row in p]
    slots = np.concatenate([logs[:, :k], np.full((n, unused), -np.inf)], axis=1)
    got = teacher_entropy(torch.from_numpy(slots), torch.from_numpy(logs[:, k]))
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_entropy_of_equal_outcomes_and_of_none() -> None:
    logs = torch.full((1, 4), -math.log(5.0), dtype=torch.float64)
    assert float(teacher_entropy(logs, logs[:, 0])) == pytest.approx(math.log(5.0), rel=1e-15)
    sure = torch.tensor([[0.0, -math.inf]]), torch.tensor([-math.inf])
    assert float(teacher_entropy(*sure)) == 0.0


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 12), count=st.integers(1, 5), width=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_sums_are_those_of_a_loop(n: int, count: int, width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    bins, figures = draw.integers(0, count, n), draw.normal(size=(n, width))
    expected = np.zeros((count, width))
    for number, row in zip(bins, figures, strict=True):
        expected[number] += row
    got = sums_by_bin(torch.from_numpy(bins), torch.from_numpy(figures), count)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-14)
