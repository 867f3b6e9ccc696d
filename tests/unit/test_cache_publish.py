"""Races, crashes and full disks: one commit per shard, all rows right, nothing half-written that could be read."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import rank_table_hash
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, committed_shards, create_cache, missing_shards, open_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans, remove_orphans, write_shard
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import (
    assert_rows_equal,
    commit_path,
    folder_of,
    make_cache,
    make_manifest,
    make_row,
    rank_table,
    shards_folder,
)

FORK = multiprocessing.get_context("fork")


def _in_children(count: int, target: Callable[..., None], *args: Any) -> list[Any]:
    """Runs ``target(i, queue, *args)`` in forked processes that start together; returns what they put, by i."""
    queue, barrier = FORK.Queue(), FORK.Barrier(count)

    def body(i: int) -> None:
        barrier.wait()
        target(i, queue, *args)

    children = [FORK.Process(target=body, args=(i,)) for i in range(count)]
    for child in children:
        child.start()
    try:
        results = dict(queue.get(timeout=30) for _ in children)
    finally:
        for child in children:
            child.join(5)
            child.kill()  # one that hangs must not hang the tests
            child.join()
    assert [child.exitcode for child in children] == [0] * count
    return [results[i] for i in range(count)]


def _rows(cache: Cache, shard: int, length: int = 30) -> list[Row]:
    return [make_row(sample, length + sample) for sample in cache.manifest.shard_samples(shard)]


def test_second_create_opens_the_first(tmp_path: Path) -> None:
    manifest = make_manifest(10, 3, library_versions={"torch": "1"})
    first = create_cache(tmp_path / "c", manifest, rank_table())
    again = create_cache(tmp_path / "c", replace(manifest, library_versions={"torch": "2"}), rank_table())
    assert again.manifest == first.manifest == manifest
    assert np.array_equal(again.rank_table, rank_table())
    assert open_cache(str(tmp_path / "c")).manifest.cache_id == manifest.cache_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "top_k there: 5, needed by this run: 6"),
        ({"teacher": {"name": "teacher", "sha256": "99"}}, "teacher.sha256 there: '12ab', needed by this run: '99'"),
        ({"corpus": {"hash": "x"}}, "corpus.hash there: None, needed by this run: 'x'"),
        ({"temperatures": (1.0, 2.0)}, r"temperatures there: \[1.0\], needed by this run: \[1.0, 2.0\]"),
    ],
)
def test_another_identity_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    manifest = make_manifest(10, 3)
    create_cache(tmp_path / "c", manifest, rank_table())
    before = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(CacheError, match=message):
        create_cache(tmp_path / "c", replace(manifest, **change), rank_table())
    assert sorted(os.listdir(tmp_path / "c")) == before


def test_a_cache_keeps_the_numbering_it_was_made_with(tmp_path: Path) -> None:
    first = create_cache(tmp_path / "c", make_manifest(1, 1), rank_table())
    write_shard(first, 0, _rows(first, 0))
    reverse = rank_table()[::-1].copy()
    again = create_cache(tmp_path / "c", make_manifest(1, 1, rank_table_hash=rank_table_hash(reverse)), reverse)
    assert again.manifest == first.manifest
    assert np.array_equal(again.rank_table, rank_table())
    assert np.array_equal(CacheReader(again).read(0).ids, make_row(0, 30).ids)


def test_impossible_manifests_and_tables_are_refused(tmp_path: Path) -> None:
    manifest = make_manifest(10, 3)
    for change, message in (
        ({"rows": 0}, "rows of a cache must be a positive integer, not 0"),
        ({"top_k": 65}, "top_k 65 is larger than the vocabulary of 64"),
        ({"value_dtype": "int8"}, "value_dtype 'int8' must be one of float16, bfloat16, float32"),
        ({"temperatures": ()}, "temperatures must be positive and distinct"),
        ({"temperatures": (1.0, 1.0)}, "temperatures must be positive and distinct"),
        ({"temperatures": (float("nan"),)}, "temperatures must be positive and distinct"),
    ):
        with pytest.raises(CacheError, match=message):
            replace(manifest, **change)
    other = rank_table()[::-1]
    with pytest.raises(CacheError, match=f"has hash {rank_table_hash(other)}, the manifest names"):
        create_cache(tmp_path / "c", manifest, other)
    with pytest.raises(CacheError, match="not a permutation"):
        create_cache(tmp_path / "c", manifest, np.zeros(64, "u4"))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format_version": 1', '"format_version": 2', "format version 2, this program reads 1"),
        ('"top_k": 5', '"top_k": 6', "was changed after it was written"),
        ('"top_k": 5', '"k": 5', r"other fields than a cache: \['k', 'top_k'\]"),
        ("{", "[", "is not JSON"),
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    cache, _ = make_cache(tmp_path / "c", [4], 1)
    text = (folder_of(cache) / "cache.json").read_text()
    assert CacheManifest.from_json(text, "here") == cache.manifest
    (folder_of(cache) / "cache.json").write_text(text.replace(old, new, 1))
    with pytest.raises(CacheError, match=message):
        open_cache(folder_of(cache))


def test_damaged_rank_table_is_refused(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [4], 1)
    (table,) = folder_of(cache).glob("rank_table-*")
    table.write_bytes(table.read_bytes()[:-4])
    with pytest.raises(CacheError, match="is damaged: it does not have the hash in its name"):
        open_cache(folder_of(cache))
    table.unlink()
    with pytest.raises(CacheError, match="without it ids cannot be decoded"):
        open_cache(folder_of(cache))


def _create(i: int, queue: Any, path: Path, differ: bool) -> None:
    try:
        manifest = make_manifest(10, 3, teacher={"name": str(i)} if differ else {})
        queue.put((i, create_cache(path, manifest, rank_table()).manifest.teacher))
    except CacheError as error:
        queue.put((i, str(error)))


@pytest.mark.parametrize("differ", [False, True])
def test_racing_creators(tmp_path: Path, differ: bool) -> None:
    for attempt in range(3):
        results = _in_children(4, _create, tmp_path / str(attempt), differ)
        good = [result for result in results if isinstance(result, dict)]
        assert len(good) == (1 if differ else 4), results
        assert all("holds another cache: teacher.name there: " in r for r in results if isinstance(r, str))


def _write(i: int, queue: Any, cache: Cache, rows: list[Row]) -> None:
    queue.put((i, write_shard(cache, 0, rows)))


def test_racing_writers_commit_once(tmp_path: Path) -> None:
    for attempt in range(4):
        cache = create_cache(tmp_path / str(attempt), make_manifest(3, 3), rank_table())
        rows = _rows(cache, 0)
        assert sorted(_in_children(4, _write, cache, rows)) == [False, False, False, True]
        assert len(list(shards_folder(cache).iterdir())) == 1
        assert verify(cache, "deep").ok and not orphans(cache)
        for row in rows:
            assert_rows_equal(CacheReader(cache).read(row.sample_id), row)


def test_committed_shard_is_not_written_again(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [4, 5, 6], 2)

    def untouched() -> Iterator[Row]:
        raise AssertionError("rows of a committed shard were computed again")
        yield

    assert not write_shard(folder_of(cache), 0, untouched())
    with pytest.raises(CacheError, match="shard 2 does not exist: the cache has 2 shards"):
        write_shard(cache, 2, untouched())


def _keep_writing(path: Path, started: Any) -> None:
    cache = open_cache(path)
    started.set()
    for shard in missing_shards(cache):
        write_shard(cache, shard, _rows(cache, shard))


def test_killed_at_random_moments(tmp_path: Path) -> None:
    samples, most_kills = 120, 30
    cache = create_cache(tmp_path / "c", make_manifest(samples, 2), rank_table())
    rng = np.random.default_rng(0)
    done: dict[int, tuple[int, int]] = {}
    kills = 0
    while missing_shards(cache):
        started = FORK.Event()
        writer = FORK.Process(target=_keep_writing, args=(folder_of(cache), started))
        writer.start()
        assert started.wait(60)  # from here on, or a busy machine would kill only processes that did nothing yet
        writer.join(rng.uniform(0.0, 0.02) if kills < most_kills else 60)
        if writer.is_alive():
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            kills += 1
        for shard in committed_shards(cache):
            state = commit_path(cache, shard).stat()
            assert done.setdefault(shard, (state.st_ino, state.st_mtime_ns)) == (state.st_ino, state.st_mtime_ns)
    left = orphans(cache)
    assert kills >= 15 and 5 <= len(left) <= kills, (kills, left)  # or the moments missed the writing
    reader = CacheReader(cache)
    reader.require_complete()
    for sample in range(samples):
        assert_rows_equal(reader.read(sample), make_row(sample, 30 + sample))
    report = verify(cache, "deep")
    assert report.ok, report.problems
    assert len(report.orphans) == len(left)
    assert remove_orphans(cache) == []  # too fresh: they could be those of a running writer
    assert remove_orphans(cache, idle_s=0) == left and not orphans(cache)
    assert verify(cache, "deep").ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": lambda x: np.where(x == x.max(), 64, x)}, r"outside \[-1, 64\)"),
        ({"ids": lambda x: np.where(x == x[7, 1], x[7, 0], x)}, "names an id twice"),
        ({"ids": lambda x: x.astype("i8")}, "ids is int64 .* needs int32"),
        ({"ids": lambda x: x[:, ::-1]}, "unused slot"),
        ({"logprobs": lambda x: x[:, ::-1]}, "do not descend"),
        ({"logprobs": lambda x: x * np.float16(0.5)}, r"temperature 1 the probabilities .* add up to"),
        ({"logprobs": lambda x: np.where(x == x[3, 1], np.nan, x)}, "position 3 do not descend"),
        ({"logprobs": lambda x: np.where(x == x[4, 0], 1, x).astype("f2")}, "position 4 is above 0 or NaN"),
        ({"logprobs": lambda x: np.where(x == x[4, 4], np.nan, x)}, "position 4 do not descend"),
        ({"logprobs": lambda x: np.where(x == x[4, 4], -np.float16("nan"), x)}, "position 4 do not descend"),
        ({"logprobs": lambda x: np.where(x == x[4, 4], np.float16(2), x)}, "position 4 do not descend"),
        ({"logprobs": lambda x: x.astype("f4")[:, ::-1]}, "do not descend"),
        ({"logprobs": lambda x: x[:, :4]}, r"logprobs is float16 \(31, 4\), this cache needs .* \(31, 5\)"),
        ({"tail_logmass": lambda x: x * np.nan}, "tail_logmass at position 0"),
        ({"tail_logmass": lambda x: x - 5}, "add up to"),
        ({"tokens": lambda x: x + 64}, "token .* at position 0 is outside the vocabulary of 64"),
        ({"loss_mask": lambda x: x + np.uint8(2)}, "must be 0 or 1"),
        ({"document_offsets": lambda x: x + np.int32(1)}, "must start at 0"),
        ({"document_offsets": lambda x: np.append(x, np.int32(31))}, "rise below 31"),
        ({"sample_id": lambda x: 0}, "row 1 of shard 0 must be sample 1, not 0"),
    ],
)
def test_bad_rows_are_refused_and_leave_nothing(
    tmp_path: Path, change: dict[str, Callable[[Any], Any]], message: str
) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(2, 2), rank_table())
    rows = _rows(cache, 0)
    (name, make), *_ = change.items()
    bad = replace(rows[1], **{name: make(getattr(rows[1], name))})
    with pytest.raises(CacheError, match=message):
        write_shard(cache, 0, [rows[0], bad])
    assert not committed_shards(cache) and not list(shards_folder(cache).iterdir())
    assert write_shard(cache, 0, rows)


def test_certain_and_impossible_tokens_can_be_stored(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(1, 1), rank_table())
    zero, never = np.float16(0), np.float16(-np.inf)
    logprobs = np.array([[zero, never, never, never, never], [-zero, zero, never, never, never]], "f2")
    row = replace(make_row(0, 2, unused=False), logprobs=logprobs, tail_logmass=np.full(2, -np.inf, "f4"))
    with pytest.raises(CacheError, match="position 0 add up to 2"):
        write_shard(cache, 0, [replace(row, logprobs=logprobs[::-1])])  # position 0 is among those added up
    row = replace(row, logprobs=logprobs[[0, 0]])
    assert write_shard(cache, 0, [row])
    assert_rows_equal(CacheReader(cache).read(0), row)
    assert verify(cache, "deep").ok


def test_wrong_normalizer_is_refused(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(1, 1, temperatures=(1.0, 2.0)), rank_table())
    row = make_row(0, 20, temperatures=(1.0, 2.0))
    with pytest.raises(CacheError, match="at temperature 2 the probabilities"):
        write_shard(cache, 0, [replace(row, log_normalizers=row.log_normalizers * 0)])
    with pytest.raises(CacheError, match=r"log_normalizers is float32 \(0, 20\), this cache needs float32 \(1, 20\)"):
        write_shard(cache, 0, [make_row(0, 20)])


def test_shards_are_whole(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(2, 2), rank_table())
    rows = _rows(cache, 0)
    with pytest.raises(CacheError, match=r"shard 0 needs 2 rows .*: got 1"):
        write_shard(cache, 0, rows[:1])
    with pytest.raises(CacheError, match="sample 2 is one too many"):
        write_shard(cache, 0, [*rows, make_row(2, 5)])
    assert not list(shards_folder(cache).iterdir())


def _write_with_small_files(i: int, queue: Any, cache: Cache) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        write_shard(cache, 1, _rows(cache, 1, 400))
        queue.put((i, "written"))
    except CacheError as error:
        queue.put((i, str(error)))


def test_file_size_limit(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(4, 2), rank_table())
    write_shard(cache, 0, _rows(cache, 0))
    (message,) = _in_children(1, _write_with_small_files, cache)
    assert "writing shard" in message and "File too large" in message and "stay valid" in message
    assert committed_shards(cache) == [0] and not orphans(cache)
    assert write_shard(cache, 1, _rows(cache, 1, 400))
    assert verify(cache, "deep").ok


IN_A_SMALL_DISK = """
    import subprocess, sys
    from pathlib import Path
    from megatron_kd.cache.store import create_cache, committed_shards
    from megatron_kd.cache.writer import write_shard, orphans
    from megatron_kd.cache.verify import verify
    from megatron_kd.errors import CacheError
    from tests.unit.cache_rows import make_manifest, make_row, rank_table
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", disk], check=True)
    cache = create_cache(disk / "c", make_manifest(4, 1), rank_table())
    write_shard(cache, 0, [make_row(0, 100)])
    def refused(shard, length):
        try:
            write_shard(cache, shard, [make_row(shard, length)])
        except CacheError as error:
            return str(error)
    full = refused(1, 20000)
    assert "No space left" in full and "free space" in full, full
    assert committed_shards(cache) == [0] and not orphans(cache)
    write_shard(cache, 1, [make_row(1, 100)])  # the failed attempt gave its space back
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    readonly = refused(2, 100)
    assert "Read-only file system" in readonly and "choose another path" in readonly, readonly
    try:
        create_cache(disk / "other", make_manifest(4, 1), rank_table())
    except CacheError as error:
        assert "creating cache" in str(error), error
    else:
        raise AssertionError("a cache was created on a read-only disk")
    report = verify(cache, "deep")
    assert report.rows_committed == 2 and len(report.problems) == 1, report
"""


def test_full_and_read_only_disk(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    alone = [unshare or "unshare", "-Urm"]
    if unshare is None or subprocess.run([*alone, "mount", "-t", "tmpfs", "none", tmp_path]).returncode:
        pytest.skip("a private mount is not permitted here")
    script = textwrap.dedent(IN_A_SMALL_DISK)
    ended = subprocess.run(
        [*alone, sys.executable, "-c", script, tmp_path],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


def test_commit_of_another_cache_is_refused(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "a", [4, 5], 1)
    other, _ = make_cache(tmp_path / "b", [4, 5], 1, teacher={"name": "other"})
    shutil.copy(commit_path(other, 0), commit_path(cache, 0))
    with pytest.raises(CacheError, match="belongs to the cache"):
        read_commit(cache, 0)
    with pytest.raises(CacheError, match=r"sample 0 .* belongs to the cache"):
        CacheReader(cache).read(0)
    CacheReader(cache).read(1)
