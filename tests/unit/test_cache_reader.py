"""Every read gives the row that was asked for, or an error that names it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_kd.cache.identity import row_hash
from megatron_kd.cache.mass import at_temperature
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import assert_rows_equal, folder_of, make_cache, make_manifest, make_row, rank_table

# Rows shorter than a chunk, of exactly one, across several, of one token.
LENGTHS = [255, 256, 257, 1, 3000, 40, 512, 7, 2049, 100, 5]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cache, list[Row]]:
    return make_cache(tmp_path_factory.mktemp("ragged") / "c", LENGTHS, 4)


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("temperatures", [(1.0,), (2.0, 1.0, 1.5)])
def test_rows_come_back(tmp_path: Path, value_dtype: str, temperatures: tuple[float, ...]) -> None:
    lengths = [300, 1, 17]
    cache, rows = make_cache(tmp_path / "c", lengths, 2, value_dtype=value_dtype, temperatures=temperatures)
    reader = CacheReader(folder_of(cache))
    assert len(reader) == 3
    for row in rows:
        if value_dtype == "bfloat16":
            row = replace(row, logprobs=torch.from_numpy(row.logprobs).bfloat16().float().numpy())
        assert_rows_equal(reader.read(row.sample_id, row.hash, expected_tokens=row.tokens), row)


def test_any_order_with_one_open_shard(ragged: tuple[Cache, list[Row]]) -> None:
    cache, rows = ragged
    reader = CacheReader(cache, open_shards=1)
    order = np.random.default_rng(0).integers(0, len(rows), 60).tolist()
    for sample in order:
        assert_rows_equal(reader.read(sample), rows[sample])
    found = reader.read_many(order, [rows[sample].hash for sample in order])
    for sample, row in zip(order, found, strict=True):
        assert_rows_equal(row, rows[sample])


def test_files_of_evicted_shards_are_closed(ragged: tuple[Cache, list[Row]]) -> None:
    cache, _ = ragged
    before = set(os.listdir("/proc/self/fd"))
    reader = CacheReader(cache, open_shards=1)
    reader.read(0)
    one = len(set(os.listdir("/proc/self/fd")) - before)
    for sample in (4, 8, 0, 5):
        reader.read(sample)
    assert len(set(os.listdir("/proc/self/fd")) - before) == one
    assert one == 5
    del reader
    assert not set(os.listdir("/proc/self/fd")) - before


def test_slices(ragged: tuple[Cache, list[Row]]) -> None:
    cache, rows = ragged
    reader = CacheReader(cache)
    rng = np.random.default_rng(1)
    for sample in [0, 1, 4, 8] * 6:
        row = rows[sample]
        start, stop = sorted(rng.choice(len(row) + 1, 2, replace=False).tolist())
        part = reader.read_slice(sample, start, stop, row.hash)
        cut = {n: getattr(row, n)[start:stop] for n in ("tokens", "loss_mask", "ids", "logprobs", "tail_logmass")}
        empty = np.empty((0, stop - start), "f4")
        wanted = replace(row, **cut, log_normalizers=empty, tail_logmass_extra=empty, start=start)
        assert_rows_equal(part, wanted)
    for start, stop in ((0, 257), (-1, 3), (5, 5)):
        with pytest.raises(CacheError, match=r"sample 1 .* positions 0 to 255, asked"):
            reader.read_slice(1, start, stop)


def test_temperatures_match_a_direct_softmax(tmp_path: Path) -> None:
    temperatures = (2.0, 1.0, 4.0)
    cache, _ = make_cache(tmp_path / "c", [50], 1, value_dtype="float32", temperatures=temperatures)
    row = CacheReader(cache).read(0)
    logits = np.random.default_rng([0, 50]).normal(0, 3, (50, 64))  # as make_row draws them
    for temperature in temperatures:
        direct = torch.log_softmax(torch.from_numpy(logits) / temperature, -1).numpy()
        logprobs, tail = at_temperature(row, cache.manifest.temperatures, temperature)
        used = row.ids >= 0
        assert np.abs(np.take_along_axis(direct, np.maximum(row.ids, 0), -1) - logprobs)[used].max() < 1e-5
        outside = 1 - (np.exp(np.take_along_axis(direct, np.maximum(row.ids, 0), -1)) * used).sum(-1)
        assert np.abs(np.log(outside) - tail).max() < 1e-4
    with pytest.raises(CacheError, match=r"temperature 3 was not captured, only 2, 1, 4"):
        at_temperature(row, cache.manifest.temperatures, 3.0)


def test_other_tokens_are_named(ragged: tuple[Cache, list[Row]]) -> None:
    cache, rows = ragged
    reader = CacheReader(cache)
    tokens = rows[4].tokens.copy()
    tokens[1234] = 63 - tokens[1234]
    other = row_hash(tokens, rows[4].document_offsets)
    with pytest.raises(CacheError, match=r"sample 4 .* made from another sample") as caught:
        reader.read(4, other)
    assert other.hex() in str(caught.value) and rows[4].hash.hex() in str(caught.value)
    message = rf"sample 4 .*at position 1234 it has {rows[4].tokens[1234]}, the sample has {tokens[1234]} "
    with pytest.raises(CacheError, match=message):
        reader.read(4, other, expected_tokens=tokens)
    with pytest.raises(CacheError, match=r"at position 2999 .* has no token \(lengths 3000 and 2999\)"):
        reader.read_slice(4, 0, 10, expected_tokens=rows[4].tokens[:-1])
    moved = row_hash(rows[4].tokens, np.array([0, 17]))
    with pytest.raises(CacheError, match="documents start elsewhere"):
        reader.read(4, moved, expected_tokens=rows[4].tokens)
    apart = row_hash(rows[4].tokens, rows[4].document_offsets, within_documents=True)
    with pytest.raises(CacheError, match=r"its tokens saw other documents \(data.packing\)"):
        reader.read(4, apart, expected_tokens=rows[4].tokens)
    with pytest.raises(CacheError, match="sample 4"):
        reader.read_many([3, 4], [rows[3].hash, other])
    with pytest.raises(ValueError, match="2 ids, but 1 expected hashes"):
        reader.read_many([3, 4], [other])


def test_missing_rows_are_named(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(11, 3), rank_table())
    reader = CacheReader(folder_of(cache))
    for shard in (0, 2):
        write_shard(cache, shard, (make_row(s, 9) for s in cache.manifest.shard_samples(shard)))
    reader.read(7)
    with pytest.raises(CacheError, match=r"sample 4 .* shard 1 .*samples 3–5.*in all: samples 3–5, 9–10; .*capture"):
        reader.read(4)
    with pytest.raises(CacheError, match=r"lacks samples 3–5, 9–10; run `megatron-kd capture` again"):
        reader.require_complete()
    with pytest.raises(CacheError, match=r"sample 11 is not in .*: it holds samples 0 to 10"):
        reader.read(11)
    for shard in (1, 3):  # a reader sees what is committed after it was opened
        write_shard(cache, shard, (make_row(s, 9) for s in cache.manifest.shard_samples(shard)))
    reader.require_complete()
    assert_rows_equal(reader.read(4), make_row(4, 9))


def test_no_cache_at_all(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"is not a cache: it has no cache\.json"):
        CacheReader(tmp_path)


def test_numpy_integers_and_wider_values(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(2, 1), rank_table())
    for shard in np.arange(2):
        row = make_row(int(shard), 9)
        # float32 log-probabilities are rounded to the type of the cache
        nearby = replace(row, logprobs=row.logprobs.astype("f4") * np.float32(1 - 1e-5))
        assert write_shard(cache, shard, [nearby])  # type: ignore[arg-type]
    (row,) = CacheReader(cache).read_many([1])
    assert_rows_equal(row, make_row(1, 9))
    found = CacheReader(cache).read(np.int64(1))  # type: ignore[arg-type]
    assert type(found.sample_id) is int
    assert_rows_equal(found, row)


def test_room_needs_no_torch() -> None:
    rooms = ("writer", "reader", "verify", "inspect", "mass")
    code = "; ".join(f"import megatron_kd.cache.{name}" for name in rooms)
    check = "import sys; assert not {'torch', 'megatron.core', 'zarr'} & sys.modules.keys(), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def test_an_open_shard_is_small(tmp_path: Path) -> None:
    """Hashes and bounds of a row are 52 bytes; as text in a list the hashes alone would be 180."""
    counts = (500, 3000)
    readers = [CacheReader(make_cache(tmp_path / str(rows), [1] * rows, rows)[0]) for rows in counts]
    readers[0].read(0)  # modules and caches of the interpreter
    sizes = []
    for reader in readers:
        reader._shards.clear()
        gc.collect()
        tracemalloc.start()
        reader.read(0)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    a_row = (sizes[1] - sizes[0]) / (counts[1] - counts[0])
    assert 30 < a_row < 80, sizes


def test_threads(ragged: tuple[Cache, list[Row]]) -> None:
    cache, rows = ragged
    reader = CacheReader(cache, open_shards=2)
    orders = [np.random.default_rng(i).permutation(len(rows)).tolist() * 4 for i in range(6)]

    def check(order: list[int]) -> None:
        for sample in order:
            assert_rows_equal(reader.read(sample), rows[sample])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(check, orders))


def _read_all(reader: CacheReader, rows: list[Row], seed: int) -> None:
    for sample in np.random.default_rng(seed).permutation(len(rows)).tolist() * 3:
        assert_rows_equal(reader.read(sample), rows[sample])


@pytest.mark.parametrize("locked", [False, True])
def test_forked_children_share_an_open_reader(ragged: tuple[Cache, list[Row]], locked: bool) -> None:
    cache, rows = ragged
    reader = CacheReader(cache, open_shards=2)
    reader.read(0)
    if locked:  # as by another thread at the moment of the fork
        thread = threading.Thread(target=reader._lock.acquire)
        thread.start()
        thread.join()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_read_all, args=(reader, rows, seed)) for seed in range(3)]
    for child in children:
        child.start()
    deadline = time.monotonic() + 30
    for child in children:
        child.join(max(deadline - time.monotonic(), 0))
        child.kill()  # one that hangs must not hang the tests
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]


def test_pickled_reader_opens_again(ragged: tuple[Cache, list[Row]]) -> None:
    cache, rows = ragged
    reader = CacheReader(cache, open_shards=3)
    reader.read(0)
    for other in (pickle.loads(pickle.dumps(reader)), copy.copy(reader)):
        assert other._open_shards == 3
        _read_all(other, rows, 0)
