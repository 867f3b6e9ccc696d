"""The same targets in every layout: what all ranks read in a step, position by position, is what one rank reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.config import load_model
from megatron_kd.data.batches import Batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.data.sampler import SampleOrder
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.steps import StepReader, train_rows
from megatron_kd.errors import DataError
from tests.assets import ROOT
from tests.unit.data_rows import K, make_cache, make_samples

LENGTH, ROWS = 12, 11
Position = tuple[int, int, bytes, bytes, bytes, int, int, float]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleSet, CachedTargets]:
    folder = tmp_path_factory.mktemp("layouts")
    samples = make_samples(folder / "samples", length=LENGTH, rows=ROWS)
    teacher = load_model("tiny_llama", ROOT / "recipes")
    make_cache(folder / "cache", samples, teacher)
    return samples, CachedTargets(folder / "cache", samples, teacher=teacher, top_k=K, temperature=1.0)


def positions_of(batch: Batch) -> Counter[Position]:
    """Every position of a batch: sample, place, bytes of its targets, token, label, weight."""
    assert batch.targets is not None
    b, s = batch.tokens.shape
    found: Counter[Position] = Counter()
    for n in range(s * b):
        place, row = divmod(n, b)
        found[
            (
                batch.sample_ids[row],
                int(batch.positions[row, place]),
                batch.targets.ids[n].numpy().tobytes(),
                batch.targets.logprobs[n].numpy().tobytes(),
                batch.targets.tail_logmass[n].numpy().tobytes(),
                int(batch.tokens[row, place]),
                int(batch.labels[n]),
                float(batch.token_weights[n]),
            )
        ] += 1
    return found


def read_steps(data: tuple[SampleSet, CachedTargets], order: SampleOrder, start: int, stop: int, **layout: int) -> Any:
    """What all ranks of a layout read together, for each step."""
    dp, cp, micro = layout["dp"], layout["cp"], layout["micro"]
    steps: list[Counter[Position]] = [Counter() for _ in range(start, stop)]
    for dp_rank in range(dp):
        for cp_rank in range(cp):
            reader = StepReader(*data, order, dp_rank, dp, micro, ContextSlice(cp_rank, cp))
            with reader.ahead(start, stop, prefetch_batches=1, num_workers=2) as ahead:
                for found, batches in zip(steps, ahead, strict=False):
                    assert {batch.tokens.shape for batch in batches} == {(micro, LENGTH // cp)}
                    for batch in batches:
                        found += positions_of(batch)
    return steps


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    dp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2]),
    accumulated=st.sampled_from([1, 2]),
    rows=st.integers(1, ROWS),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    resumed_at=st.integers(0, 4),
)
def test_every_layout_reads_the_same(
    data: tuple[SampleSet, CachedTargets],
    dp: int,
    cp: int,
    micro: int,
    accumulated: int,
    rows: int,
    seed: int,
    shuffle: bool,
    resumed_at: int,
) -> None:
    """Subsets, epochs (a step may straddle some) and a run that was interrupted included."""
    batch, stop = dp * micro * accumulated, 4

    def order() -> SampleOrder:
        ids = train_rows(data[0], rows * LENGTH)
        return SampleOrder(ids, seed=seed, shuffle=shuffle, global_batch_size=batch)

    alone = read_steps(data, order(), 0, stop, dp=1, cp=1, micro=1)
    before = read_steps(data, order(), 0, resumed_at, dp=dp, cp=cp, micro=micro)
    after = read_steps(data, order(), resumed_at, stop, dp=dp, cp=cp, micro=micro) if resumed_at < stop else []
    assert before + after == alone
    assert all(step.total() == batch * LENGTH for step in alone)
    assert {sample for step in alone for sample, *_ in step} <= set(range(rows))


def test_the_comparison_sees_a_single_position(data: tuple[SampleSet, CachedTargets]) -> None:
    order = SampleOrder(ROWS, seed=1, shuffle=True, global_batch_size=2)
    (batch,) = StepReader(*data, order, 0, 1, 2)(0)
    whole = positions_of(batch)
    assert batch.targets is not None
    for changed in (batch.targets.ids, batch.targets.logprobs, batch.targets.tail_logmass, batch.labels):
        kept = changed[7].clone()
        changed[7] += 1
        assert positions_of(batch) != whole
        changed[7] = kept
    assert positions_of(batch) == whole


def test_reading_ahead_is_reading_now(data: tuple[SampleSet, CachedTargets]) -> None:
    order = SampleOrder(ROWS, seed=1, shuffle=True, global_batch_size=4)
    reader = StepReader(*data, order, 1, 2, 1)
    with reader.ahead(2, 7, prefetch_batches=3, num_workers=4) as ahead:
        steps = list(ahead)
        assert ahead.waited_s >= 0
    assert len(steps) == 5
    for step, batches in enumerate(steps, 2):
        now = reader(step)
        assert [b.sample_ids for b in batches] == [b.sample_ids for b in now]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, now, strict=True))


def test_rows_to_train_on(data: tuple[SampleSet, CachedTargets]) -> None:
    samples = data[0]
    assert train_rows(samples, None) == range(ROWS)
    assert train_rows(samples, 3 * LENGTH + 5) == range(3)
    with pytest.raises(DataError, match=r"train_tokens 144 is 12 rows of 12 tokens, .* has 11 .* to 132"):
        train_rows(samples, 12 * LENGTH)
