"""A disk that refuses to be read says nothing about the cache: nobody may take its shards for damaged."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.storage import LocalStorage
from megatron_kd.cache.store import create_cache
from megatron_kd.cache.verify import Level, verify
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError, StoreUnreachableError
from tests.unit.cache_rows import make_cache, make_manifest, make_row, rank_table, shards_folder


@pytest.mark.parametrize("name", ["commits/000001.json", "rank/c.0.0", "tokens/zarr.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
def test_a_file_that_is_refused_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    [damaged] = shards_folder(cache).glob("000002-*/rank/c.0.0")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    opened = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(name) and "000001" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    if code in (errno.ESTALE, errno.EMFILE):  # the next file would be refused as well
        with pytest.raises(StoreUnreachableError, match=os.strerror(code)):
            verify(cache, "structure")
        return
    report = verify(cache, "structure")
    assert (report.unreadable_shards, report.damaged_shards) == ([1], [2])
    unreadable, damage = report.problems
    assert name in unreadable and os.strerror(code) in unreadable and "000002" in damage
    assert report.text().startswith("shard 2 is damaged; shard 1 is not readable at level structure")
    with pytest.raises(StoreUnreachableError, match=os.strerror(code)):  # nothing could be judged
        verify(cache, "structure", shards=[1])


@pytest.mark.parametrize("level", ["inventory", "deep"])
def test_one_dangling_shard_is_listed_beside_the_damage(tmp_path: Path, level: Level) -> None:
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    first, second, _ = sorted(shards_folder(cache).iterdir())
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "unplugged")
    (second / "rank" / "zarr.json").unlink()
    report = verify(cache, level)
    assert (report.unreadable_shards, report.damaged_shards) == ([0], [1])
    assert "unplugged, which is not there: is its disk mounted" in report.problems[0]


def test_a_commit_whose_answer_never_came_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request lands after the writer has given up: the record then stands for files that are still there."""
    cache = create_cache(tmp_path / "c", make_manifest(1, 1), rank_table())
    late: list[tuple[LocalStorage, str, bytes]] = []

    def unanswered(storage: LocalStorage, name: str, data: bytes) -> bool:
        late.append((storage, name, data))
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    row = make_row(0, 30)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", unanswered)
        with pytest.raises(CacheError, match="writing shard"):
            write_shard(cache, 0, [row])
    [(storage, name, data)] = late
    assert storage.create(name, data)
    assert (CacheReader(cache).read(0).ids == row.ids).all()
    assert verify(cache, "deep").ok


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_reading_gives_no_advice_on_damage_where_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    opened = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("rank/c.0.0"):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnreachableError, match=os.strerror(code)) as caught:
        CacheReader(cache).read(1)
    assert "repair" not in str(caught.value)
    assert ("ulimit -n" in str(caught.value)) == (code == errno.EMFILE)


def test_a_reader_leaves_files_to_others(tmp_path: Path) -> None:
    """Seventy shards with four further temperatures would hold 13 files each."""
    extra = (1.0, 2.0, 4.0, 8.0, 16.0)
    cache, _ = make_cache(tmp_path / "c", [3] * 70, 1, temperatures=extra)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 250, hard))
    try:
        reader = CacheReader(cache)
        for sample in range(70):
            reader.read(sample)
        assert 13 < len(os.listdir("/proc/self/fd")) - before <= (before + 250 - 128) // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(CacheReader(cache)) == 70
