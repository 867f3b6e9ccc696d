"""The order of training: each epoch a permutation, a pure function of seed and position, the same for all layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.data.sampler import SampleOrder, splitmix64
from megatron_kd.errors import ConfigError


def order(ids: Any, gbs: int = 4, seed: int = 0, shuffle: bool = True) -> SampleOrder:
    return SampleOrder(ids, seed=seed, shuffle=shuffle, global_batch_size=gbs)


@given(st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    ids = range(100, 100 + n)
    epoch_ids = order(ids, seed=seed).ids_at(epoch * n, n)
    assert epoch_ids.dtype == np.int64
    assert sorted(epoch_ids.tolist()) == list(ids)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
def test_steps_cut_one_endless_sequence(n: int, gbs: int, steps: int) -> None:
    straight = order(n, gbs)
    sequence = np.concatenate([straight.ids_at(epoch * n, n) for epoch in range(steps * gbs // n + 2)])
    # A fresh object at every step: nothing is carried from the steps before.
    for step in range(0, steps, 3):
        np.testing.assert_array_equal(order(n, gbs).ids_of_step(step), sequence[step * gbs : (step + 1) * gbs])


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3]), st.integers(0, 60))
def test_every_layout_sees_the_same_global_batch(dp_size: int, micro_batch_size: int, consumed: int) -> None:
    gbs = 72
    samples = order(50, gbs)
    expected = samples.ids_at(consumed, gbs)
    ranks = [samples.ids_for(consumed, rank, dp_size, micro_batch_size) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {gbs // dp_size // micro_batch_size}
    # Micro batch by micro batch, rank by rank, the blocks follow one another.
    joined = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert all(batch.shape == (micro_batch_size,) for batch in joined)
    np.testing.assert_array_equal(np.concatenate(joined), expected)


def test_orders_differ_by_seed_and_epoch() -> None:
    n = 1000
    epochs = [order(n, seed=seed).ids_at(epoch * n, n) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len({epoch.tobytes() for epoch in epochs}) == 9
    for epoch in epochs:  # no trace of the numbering is left: correlation within 4 standard errors
        assert abs(np.corrcoef(epoch, np.arange(n))[0, 1]) < 4 / np.sqrt(n)


def test_without_shuffling() -> None:
    assert order(range(5, 8), shuffle=False).ids_at(2, 5).tolist() == [7, 5, 6, 7, 5]


def test_the_order_never_changes() -> None:
    """Resuming relies on it across versions of everything. The values are those of this definition."""
    # Reference values of SplitMix64 from state 0 and 1 (its first output each).
    assert splitmix64(np.array([0, 1], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]

    def mix(x: int) -> int:
        mask = 2**64 - 1
        z = (x + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix((mix(1234) + 3) & (2**64 - 1))
    expected = sorted(range(9), key=lambda i: mix(i ^ key))
    assert order(9, seed=1234).ids_at(3 * 9, 9).tolist() == expected


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="train split is empty"):
        order(0)
    with pytest.raises(ConfigError, match="global_batch_size must be at least 1"):
        order(5, gbs=0)
    with pytest.raises(ConfigError, match="seed"):
        order(5, seed=-1)
    with pytest.raises(
        ConfigError, match=r"global_batch_size 4 is .* training\.micro_batch_size 1 × data-parallel size 3 = 3"
    ):
        order(5).ids_for(0, 0, 3, 1)
    with pytest.raises(ValueError, match="dp_rank 2"):
        order(5).ids_for(0, 2, 2, 1)
    with pytest.raises(ValueError, match="negative"):
        order(5).ids_at(-1, 1)
