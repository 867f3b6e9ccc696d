"""Parts of a capture, the rows its rank table is counted on, and the thread that writes while it scores."""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.storage import LocalStorage
from megatron_kd.cache.store import Cache, committed_shards, create_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans, write_shard
from megatron_kd.data.samples import RowBatch
from megatron_kd.errors import CacheError, CheckpointError, ConfigError, StoreUnreachableError
from megatron_kd.teacher import score
from megatron_kd.teacher.capture import draw_shards
from megatron_kd.teacher.capture_cache import check_committed
from megatron_kd.teacher.part import WHOLE, Part
from megatron_kd.teacher.rank_probe import probe_plan
from megatron_kd.teacher.shard_writer import RowQueue, ShardWriter
from megatron_kd.teacher.topk import extract_top_k
from tests.unit.cache_rows import (
    assert_rows_equal,
    commit_path,
    make_cache,
    make_manifest,
    make_row,
    rank_table,
    shards_folder,
)


@given(count=st.integers(1, 40), total=st.integers(0, 200))
def test_parts_are_disjoint_even_and_all(count: int, total: int) -> None:
    parts = [Part.parse(f"{i}/{count}").shards(total) for i in range(1, count + 1)]
    assert [shard for part in parts for shard in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_whole_is_one_part() -> None:
    assert WHOLE.shards(7) == range(7) and str(WHOLE) == "1/1"


@pytest.mark.parametrize("text", ["", "2", "a/b", "1/", "/2", "1/2/3", "-1/2", "1.0/2", " 1/2", "１/２"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ConfigError, match="write which part of how many"):
        Part.parse(text)


@pytest.mark.parametrize("text", ["0/8", "9/8", "0/0"])
def test_parts_count_from_one(text: str) -> None:
    with pytest.raises(ConfigError, match="counted from 1"):
        Part.parse(text)


@given(
    rows=st.integers(1, 10**6),
    length=st.integers(1, 4096).map(lambda n: 4 * n),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_the_probe_is_small_and_spread(rows: int, length: int, multiple: int) -> None:
    chosen, prefix = probe_plan(rows, length, multiple)
    assert 1 <= prefix <= length and prefix % multiple == 0
    assert len(chosen) == 1 or len(chosen) * prefix <= min(4096, rows * length / 64)
    assert len(set(chosen)) == len(chosen) and chosen == sorted(chosen)
    # Every sample is about as near to a chosen one as it can be.
    edges = np.array([0, *chosen, rows - 1])
    assert np.diff(edges).max() <= rows / len(chosen) + 1 and 0 <= edges.min() <= edges.max() < rows


def test_jobs_in_step_do_little_twice() -> None:
    """Two jobs that look at the same moments: in order every shard would be done twice, by lot few are."""
    rng, twice = random.Random(0), 0
    for _ in range(20):
        done: set[int] = set()
        taken: tuple[set[int], set[int]] = (set(), set())
        while len(done) < 64:
            drawn = [draw_shards([s for s in range(64) if s not in done | mine], 2, rng) for mine in taken]
            for mine, new in zip(taken, drawn, strict=True):
                mine.update(new)
                done.update(new)
        twice += len(taken[0] & taken[1])
    assert twice / 20 < 12, f"of 64 shards {twice / 20} were done twice"


class _Counting(LocalStorage):
    """A folder that notes what is read of it, but for its shards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: list[str] = []

    def read(self, name: str, limit: int) -> bytes:
        self.seen.append(name)
        return super().read(name, limit)


def test_a_record_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = create_cache(tmp_path / "c", make_manifest(10, 2), rank_table())

    def write(*shards: int) -> None:
        for shard in shards:
            write_shard(made, shard, [make_row(sample, 40) for sample in made.manifest.shard_samples(shard)])

    write(0, 1, 4)
    storage = _Counting(tmp_path / "c")
    cache = Cache(storage, made.manifest, made.rank_table)
    known = check_committed(cache, range(1, 5), repair=False, show_progress=True)
    assert known.shards == {1, 4} and known.tokens == 4 * 40
    # One of them also shows that the shards are there at all.
    assert sorted(storage.seen) == ["commits/000001.json", "commits/000001.json", "commits/000004.json"]
    assert "verify inventory: 4/4 rows" in capsys.readouterr().err
    storage.seen.clear()
    write(3)
    known = known.with_new(cache, [1, 3, 4])
    assert storage.seen == ["commits/000003.json"]
    files = [*(path for shard in (1, 3, 4) for path in tmp_path.rglob(f"shards/{shard:06d}-*/**/*") if path.is_file())]
    files += [tmp_path / f"c/commits/{shard:06d}.json" for shard in (1, 3, 4)]
    assert (known.shards, known.tokens) == ({1, 3, 4}, 6 * 40)
    assert known.bytes == sum(path.stat().st_size for path in files)


def test_repair_leaves_what_is_good_to_count(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(4, 2), rank_table())
    for shard in range(2):
        write_shard(cache, shard, [make_row(sample, 40) for sample in cache.manifest.shard_samples(shard)])
    (tmp_path / "c/commits/000001.json").write_text("{")
    with pytest.raises(CacheError, match=r"shard 1 .* is damaged"):
        check_committed(cache, range(2), repair=False, show_progress=False)
    assert check_committed(cache, range(1), repair=False, show_progress=False).shards == {0}
    assert check_committed(cache, range(2), repair=True, show_progress=False).with_new(cache, [0]).tokens == 80
    assert committed_shards(cache) == [0]


def test_a_row_queue_is_bounded_and_keeps_the_order() -> None:
    rows, queue, most = [make_row(i, 3) for i in range(50)], RowQueue(3), 0
    put = 0

    def fill() -> None:
        nonlocal put
        for row in rows:
            queue.put(row)
            put += 1
        queue.end()

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    for i, row in enumerate(queue):
        assert row is rows[i]
        time.sleep(0.001)
        most = max(most, put - i)
    filler.join(10)
    assert i == 49 and most <= 5  # three wait, one is being put, one is being read


def test_nobody_waits_for_a_reader_that_left() -> None:
    queue = RowQueue(1)
    queue.put(make_row(0, 3))
    waiting = threading.Thread(target=queue.put, args=(make_row(1, 3),), daemon=True)
    waiting.start()
    queue.leave()
    waiting.join(10)
    assert not waiting.is_alive()
    queue.put(make_row(2, 3))


def test_shards_are_written_behind_each_other(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(5, 2), rank_table())
    with ShardWriter(cache, 1) as writer:
        for shard in (1, 0, 2):
            writer.begin(shard)
            for sample in cache.manifest.shard_samples(shard):
                writer.put(make_row(sample, 40))
                writer.check()
            writer.end()
        writer.finish()
        assert writer.committed == [1, 0, 2]
    assert verify(cache, "deep").ok and not orphans(cache)
    for sample in range(5):
        assert_rows_equal(CacheReader(cache).read(sample), make_row(sample, 40))


def _put_until_it_fails(writer: ShardWriter, rows: Iterable[Row]) -> None:
    for row in rows:
        writer.put(row)
        time.sleep(0.001)  # as scoring would take
        writer.check()


def test_a_shard_that_another_job_committed_is_not_ours(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(2, 2), rank_table())
    write_shard(cache, 0, [make_row(0, 40), make_row(1, 40)])
    with ShardWriter(cache, 1) as writer:
        writer.begin(0)
        for _ in range(20):  # nobody reads them, and nobody waits
            writer.put(make_row(0, 40))
        writer.end()
        writer.finish()
        assert writer.committed == []


def test_a_refused_row_is_reported_and_blocks_nobody(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(100, 100), rank_table())
    with ShardWriter(cache, 2) as writer:
        writer.begin(0)
        with pytest.raises(CacheError, match="row 1 of shard 0 must be sample 1, not 7"):
            _put_until_it_fails(writer, [make_row(0, 40)] + [make_row(7, 40)] * 1000)
    assert not committed_shards(cache) and not orphans(cache)


def test_a_full_disk_is_noticed_within_a_few_rows(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(1000, 1000), rank_table())
    rows = (make_row(sample, 512) for sample in range(1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with ShardWriter(cache, 2) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            writer.begin(0)
            with pytest.raises(CacheError, match=r"File too large.*Shards already committed stay valid"):
                _put_until_it_fails(writer, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # A position of five slots takes ten bytes or so; what Python buffers, what waits, and some more.
    assert 1000 - sum(1 for _ in rows) <= 60
    assert not committed_shards(cache) and not orphans(cache)


def test_what_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(4, 2), rank_table())
    with suppress(KeyError), ShardWriter(cache, 2) as writer:
        writer.begin(0)
        writer.put(make_row(0, 40))
        writer.put(make_row(1, 40))
        writer.end()
        writer.begin(1)
        writer.put(make_row(2, 40))
        raise KeyError("the scoring failed")
    assert committed_shards(cache) == [0], "its rows were all there"
    assert not orphans(cache)
    assert not [thread.name for thread in threading.enumerate() if "shard-writer" in thread.name]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("place", [0, 7, 63])
def test_a_teacher_that_returns_nan_is_named(sign: float, place: int) -> None:
    """Two rows of three positions; NaN has a sign, and processors make either."""
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    logits[4 * 1 + 1, place] = torch.tensor(sign * float("nan"))  # sequence first: position 2 of row 1
    batch = RowBatch(np.zeros((2, 3), "i4"), np.ones((2, 3), "u1"), [np.zeros(1, "i4")] * 2)
    extracted = extract_top_k(logits, torch.eye(64), 5, vocab_size=64, extra_temperatures=(2.0,))
    with pytest.raises(CheckpointError, match="the teacher returned NaN for sample 11 at position 2"):
        score.rows_of(range(10, 12), batch, extracted, np.float16)


def test_nothing_is_taken_out_that_cannot_be_read(tmp_path: Path) -> None:
    """One shard is damaged, another on a disk that is not mounted: the capture ends, and every record stays."""
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    first, second, _ = sorted(shards_folder(cache).iterdir())
    first.rename(tmp_path / "unplugged")
    first.symlink_to(tmp_path / "disk")
    (second / "rank" / "c.0.0").write_bytes(b"short")
    for repair in (False, True):
        with pytest.raises(StoreUnreachableError, match=r"shard 0 is not readable, which is no damage.*nothing was"):
            check_committed(cache, range(3), repair=repair, show_progress=False)
    assert committed_shards(cache) == [0, 1, 2]
    first.unlink()
    (tmp_path / "unplugged").rename(first)
    check_committed(cache, range(3), repair=True, show_progress=False)
    assert committed_shards(cache) == [0, 2]


@pytest.mark.parametrize("part", [range(2), range(2, 3)])
def test_a_capture_ends_where_no_shard_is_there(tmp_path: Path, part: range) -> None:
    """Whichever part it does, with or without anything committed in it."""
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    commit_path(cache, 2).unlink()
    shards_folder(cache).rename(tmp_path / "disk")
    shards_folder(cache).mkdir()
    for repair in (False, True):
        with pytest.raises(StoreUnreachableError, match="shards is empty although 2 commit records name some"):
            check_committed(cache, part, repair=repair, show_progress=False)
    assert committed_shards(cache) == [0, 1]
