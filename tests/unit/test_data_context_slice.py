"""Context-parallel slices against Megatron-Core's own cut of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.config import load_model
from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.data.batches import Batch, make_batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError, ConfigError
from tests.assets import ROOT
from tests.unit.data_rows import K, make_cache, make_samples

ROWS = [2, 0, 3]
LENGTHS = [24, 48, 2400]  # rows of 2400 lie in ten inner chunks, and a slice in some of them


class Group:
    """A context-parallel group as Megatron-Core asks for its size and rank; no process stands behind it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def megatron_cut(values: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """What Megatron-Core gives one rank of tensors [b, s, …]."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    with pytest.MonkeyPatch.context() as patch:
        # It asks torch.distributed, which knows only groups of running processes.
        patch.setattr(torch.distributed, "get_world_size", Group.size)
        patch.setattr(torch.distributed, "get_rank", Group.rank)
        group: Any = Group(rank, size)
        cut: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(dict(values), False, group)
    return cut


def fields(batch: Batch, length: int) -> dict[str, torch.Tensor]:
    """All of a batch as [b, s, …], the order in which Megatron-Core cuts."""
    assert batch.targets is not None
    flat = {
        "labels": batch.labels,
        "token_weights": batch.token_weights,
        "ids": batch.targets.ids,
        "logprobs": batch.targets.logprobs,
        "tails": batch.targets.tail_logmass,
    }
    b = len(batch.sample_ids)
    first = {name: value.view(length, b, *value.shape[1:]).transpose(0, 1).contiguous() for name, value in flat.items()}
    return {"tokens": batch.tokens, "positions": batch.positions.contiguous(), **first}


@settings(deadline=None)  # the first call imports Megatron-Core
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 8))
def test_positions_are_megatrons(size: int, chunk: int, rank: int) -> None:
    rank %= size
    length = 2 * size * chunk
    ours = ContextSlice(rank, size).positions(length)
    (theirs,) = megatron_cut({"x": torch.arange(length)[None]}, rank, size)["x"]
    assert ours.tolist() == theirs.tolist()
    ranges = ContextSlice(rank, size).ranges(length)
    assert [n for run in ranges for n in run] == theirs.tolist()
    assert len(ranges) == (1 if rank == size - 1 else 2)


@pytest.fixture(scope="module", params=LENGTHS)
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleSet, Path]:
    folder = tmp_path_factory.mktemp("slices")
    samples = make_samples(folder / "samples", length=request.param, rows=5)
    make_cache(folder / "cache", samples, load_model("tiny_llama", ROOT / "recipes"))
    return samples, folder / "cache"


def cached_of(opened: tuple[SampleSet, Path], **changes: Any) -> CachedTargets:
    settings: dict[str, Any] = {"teacher": load_model("tiny_llama", ROOT / "recipes"), "top_k": K, "temperature": 1.0}
    return CachedTargets(opened[1], opened[0], **{**settings, **changes})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_of_a_batch_are_megatrons(opened: tuple[SampleSet, Path], size: int) -> None:
    samples = opened[0]
    cached = cached_of(opened)
    whole = fields(make_batch(samples, ROWS, cached), samples.seq_length)
    assert (whole["labels"] >= 0).any() and (whole["labels"] < 0).any()
    for rank in range(size):
        part = fields(make_batch(samples, ROWS, cached, context=ContextSlice(rank, size)), samples.seq_length // size)
        for name, expected in megatron_cut(whole, rank, size).items():
            assert part[name].dtype == expected.dtype
            assert part[name].numpy().tobytes() == expected.contiguous().numpy().tobytes(), name


@pytest.mark.parametrize(("top_k", "temperature"), [(3, 1.0), (K, 2.5), (3, 2.5)])
def test_slices_at_any_k_and_temperature(opened: tuple[SampleSet, Path], top_k: int, temperature: float) -> None:
    cached = cached_of(opened, top_k=top_k, temperature=temperature)
    whole = fields(make_batch(opened[0], ROWS, cached), opened[0].seq_length)
    part = fields(make_batch(opened[0], ROWS, cached, ContextSlice(1, 3)), opened[0].seq_length // 3)
    for name, expected in megatron_cut(whole, 1, 3).items():
        np.testing.assert_array_equal(part[name], expected, err_msg=name)


@pytest.mark.parametrize("size", [2, 4])
def test_only_the_chunks_of_the_slice_are_decoded(
    opened: tuple[SampleSet, Path], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the reader of arrays: wide elements that it was asked to decode, in chunks of 256."""
    samples, chunk = opened[0], 256
    decoded: list[tuple[str, int]] = []
    original = ArrayReader._decode

    def counting(self: ArrayReader, number: int, payload: Any, out: Any) -> None:
        decoded.append((self.spec.name, number))
        original(self, number, payload, out)

    monkeypatch.setattr(ArrayReader, "_decode", counting)
    for rank in range(size):
        context = ContextSlice(rank, size)
        cached = cached_of(opened)
        decoded.clear()
        cached.targets([1], context)
        base = samples.seq_length  # row 1 is behind row 0 in its shard
        needed = {n // chunk for run in context.ranges(base) for n in (base + run.start, base + run.stop - 1)}
        for run in context.ranges(base):
            needed |= set(range((base + run.start) // chunk, (base + run.stop - 1) // chunk + 1))
        for name in ("rank", "logprob_delta"):
            assert {number for array, number in decoded if array == name} == needed
        assert any(array == "tokens" for array, _ in decoded), "the hash of the whole row is proven"


def test_a_token_outside_the_slice_is_proven_too(tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "samples", length=48, rows=5)
    teacher = load_model("tiny_llama", ROOT / "recipes")
    make_cache(tmp_path / "cache", samples, teacher)
    cached = CachedTargets(tmp_path / "cache", samples, teacher=teacher, top_k=K, temperature=1.0)
    context = ContextSlice(0, 2)  # positions 0 to 11 and 36 to 47
    cached.targets([2], context)
    tokens = np.load(samples.path / "tokens.npy", mmap_mode="r+")
    tokens[2, 20] = (int(tokens[2, 20]) + 1) % 900  # the samples are mapped: the run sees it at once
    tokens.flush()
    with pytest.raises(CacheError, match=r"sample 2 .*at position 20"):
        cached.targets([2], context)


def test_lengths_that_do_not_divide() -> None:
    assert ContextSlice().ranges(7) == (range(7),)
    with pytest.raises(ConfigError, match=r"seq_length 10 .* 2 × parallelism\.context_parallel_size 2 = 4"):
        ContextSlice(1, 2).ranges(10)
    with pytest.raises(ValueError, match="rank 2 is outside 0 … 1"):
        ContextSlice(2, 2)
    parallelism = ParallelismConfig(context_parallel_size=3)
    cluster = ClusterConfig(gpus_per_node=3)
    (only,) = (p for p in parallelism.problems(cluster, 10, {}) if "seq_length" in p)
    assert only == "data.seq_length 10 must be a multiple of 2 × parallelism.context_parallel_size 3: use 6"
    assert not [p for p in parallelism.problems(cluster, 12, {}) if "seq_length" in p]
