"""Ranks that look up the rows of their samples together find what each would find alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.data.packing import PackedRow
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.testing import run_distributed
from tests.assets import ROOT
from tests.unit.data_rows import TEMPERATURES, K, make_cache, make_samples, packed_rows

L = 9


def _rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from megatron_kd.cache.store import open_cache
    from megatron_kd.config import load_model
    from megatron_kd.data.cached_targets import CachedTargets
    from megatron_kd.data.row_join import rows_by_hash, rows_by_hash_together
    from megatron_kd.device import gather_arrays
    from megatron_kd.errors import KDError

    cache, few, mixed = open_cache(folder / "cache"), open_samples(folder / "few"), open_samples(folder / "mixed")
    found: dict[str, Any] = {
        "gathered": [gather_arrays(np.arange(3 * rank, dtype=np.int64)), gather_arrays(np.array([], np.int32))],
        "together": rows_by_hash_together("opening", cache, few),
        "alone": rows_by_hash(cache, few),
    }
    cached = CachedTargets(
        cache.location,
        few,
        teacher=load_model("tiny_llama", ROOT / "recipes"),
        top_k=K,
        temperature=TEMPERATURES[0],
        share=(rank, world),
    )
    found["joined"] = [cached.joined]
    cached.join("opening")
    found["joined"].append(cached.joined)
    found["targets"] = cached.targets(range(len(few))).ids.numpy()
    try:
        rows_by_hash_together("opening", cache, mixed)
    except KDError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


def _some(samples: SampleSet, ids: list[int]) -> list[PackedRow]:
    return [PackedRow(samples.tokens(i), samples.loss_mask(i), samples.document_offsets(i)) for i in ids]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from megatron_kd.config import load_model

    folder = tmp_path_factory.mktemp("join")
    samples = make_samples(folder / "samples")
    make_cache(folder / "cache", samples, load_model("tiny_llama", ROOT / "recipes"))
    make_samples(folder / "few", splits={"train": _some(samples, [4, 1]), "heldout": _some(samples, [2, 4, 0])})
    make_samples(folder / "mixed", splits={"train": [*_some(samples, [3]), *packed_rows(L, 2, seed=5)]})
    # More ranks than shards: some have no share.
    return run_distributed(_rank, 4, folder)


def test_all_find_what_one_finds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        np.testing.assert_array_equal(rank["together"], [4, 1, 2, 4, 0])
        np.testing.assert_array_equal(rank["together"], rank["alone"])
        assert rank["joined"] == [False, True]
        np.testing.assert_array_equal(rank["targets"], found[0]["targets"])


def test_arrays_of_any_length_are_gathered(found: list[dict[str, Any]]) -> None:
    for rank in found:
        some, none = rank["gathered"]
        assert [part.tolist() for part in some] == [list(range(3 * r)) for r in range(4)]
        assert [(part.dtype, len(part)) for part in none] == [(np.dtype(np.int32), 0)] * 4


def test_one_rank_names_what_is_missing(found: list[dict[str, Any]]) -> None:
    first, *others = (rank["refused"] for rank in found)
    assert first.startswith("CacheError: ") and "2 of 3 rows are not among the 5 there (samples 1–2)" in first
    assert others == ["RemoteRankError: opening failed on another rank; its message says why"] * 3
