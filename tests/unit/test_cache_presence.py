"""A disk that is not mounted is not a cache whose shards were deleted: nothing is removed, and the message says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_kd.cache.clean import clean
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.presence import make_folders, require_shards
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import Cache, create_cache, missing_shards
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError, StoreUnreachableError
from tests.unit.cache_rows import (
    assert_rows_equal,
    commit_path,
    commits_folder,
    folder_of,
    make_cache,
    make_manifest,
    make_row,
    rank_table,
    shards_folder,
)


def _away(cache: Cache) -> Path:
    elsewhere = folder_of(cache).parent / "disk"
    shards_folder(cache).rename(elsewhere)
    return elsewhere


def _dangling(cache: Cache) -> str:
    elsewhere = _away(cache)
    shards_folder(cache).symlink_to(elsewhere)
    elsewhere.rename(elsewhere.with_name("unplugged"))
    return r"shards is a link to .*disk, which is not there: is its disk mounted"


def _missing(cache: Cache) -> str:
    _away(cache)
    return r"shards is missing although 3 commit records name some: is its disk mounted.*remove .*commits too"


def _empty(cache: Cache) -> str:
    _away(cache)
    shards_folder(cache).mkdir()
    return r"shards is empty although 3 commit records name some: is its disk mounted"


def _another_disk(cache: Cache) -> str:
    _away(cache)
    (shards_folder(cache) / f"000001-{'0' * 32}").mkdir(parents=True)
    return r"shards has none of the shards although 3 commit records name some"


@pytest.mark.parametrize("lose", [_dangling, _missing, _empty, _another_disk])
def test_shards_that_are_not_there_are_not_called_damaged(tmp_path: Path, lose: Callable[[Cache], str]) -> None:
    cache, rows = make_cache(tmp_path / "c", [30, 40, 50], 1)
    message = lose(cache)
    for ask in (
        lambda: verify(cache, "inventory"),
        lambda: verify(cache, "crc", shards=[1]),
        lambda: inspect(cache),
        lambda: clean(cache, 0.0),
        lambda: make_folders(cache),
    ):
        with pytest.raises(StoreUnreachableError, match=message):
            ask()
    assert missing_shards(cache) == []  # every record is still there
    if shards_folder(cache).is_symlink():
        shards_folder(cache).unlink()
    shutil.rmtree(shards_folder(cache), ignore_errors=True)
    elsewhere = next(folder for folder in (tmp_path / "disk", tmp_path / "unplugged") if folder.exists())
    shards_folder(cache).symlink_to(elsewhere)  # mounted again
    assert verify(cache, "deep").ok
    assert_rows_equal(CacheReader(cache).read(1), rows[1])


@pytest.mark.parametrize("name", ["", "rank", "rank/c.0.0"])
def test_a_link_of_one_shard_that_leads_nowhere_is_no_damage(tmp_path: Path, name: str) -> None:
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    target = shards_folder(cache) / read_commit(cache, 1).attempt / name
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    assert verify(cache, "deep").ok  # links are followed
    (tmp_path / "elsewhere").rename(tmp_path / "unplugged")
    assert verify(cache, "crc").unreadable_shards == [1] and not verify(cache, "crc").damaged_shards
    for level in ("inventory", "crc"):
        with pytest.raises(StoreUnreachableError, match=r"is a link to .*elsewhere, which is not there: is its disk"):
            verify(cache, level, shards=[1])
    with pytest.raises(StoreUnreachableError, match="is its disk mounted"):
        CacheReader(cache).read(1)


def test_one_shard_that_is_gone_is_damage(tmp_path: Path) -> None:
    """Whichever it is: the first, whose record is looked at, and where that record is damaged itself."""
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    shutil.rmtree(shards_folder(cache) / read_commit(cache, 0).attempt)
    assert verify(cache, "inventory").damaged_shards == [0]
    commit_path(cache, 0).write_text("{}")
    require_shards(cache)
    assert verify(cache, "inventory").damaged_shards == [0]


def test_shards_really_lost_are_begun_anew_without_their_records(tmp_path: Path) -> None:
    cache, rows = make_cache(tmp_path / "c", [30, 40], 1)
    shutil.rmtree(shards_folder(cache))
    shutil.rmtree(commits_folder(cache))
    assert missing_shards(cache) == [0, 1] and verify(cache, "deep").missing_samples == "0–1"
    assert not clean(cache, 0.0).removed
    make_folders(cache)
    for shard in (0, 1):
        assert write_shard(cache, shard, [rows[shard]])
    assert verify(cache, "deep").ok


@pytest.mark.parametrize("lost", [["shards"], ["commits"], ["shards", "commits"]])
def test_empty_folders_that_a_copy_left_out_are_made(tmp_path: Path, lost: list[str]) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(1, 1), rank_table())
    for name in lost:
        (folder_of(cache) / name).rmdir()
    assert verify(cache, "crc").problems == ["samples 0 are missing: shard 0 was never committed"]
    make_folders(cache)
    assert write_shard(cache, 0, [make_row(0, 30)]) and verify(cache, "deep").ok


def test_shards_whose_records_are_lost_are_kept(tmp_path: Path) -> None:
    """Without records every shard looks like a leftover: neither are they captured again nor cleaned away."""
    cache, _ = make_cache(tmp_path / "c", [30, 40], 1)
    commits_folder(cache).rename(tmp_path / "records")
    for ask in (
        lambda: missing_shards(cache),
        lambda: verify(cache, "crc"),
        lambda: clean(cache, 0.0),
        lambda: make_folders(cache),
        lambda: CacheReader(cache).require_complete(),
    ):
        with pytest.raises(CacheError, match=r"commits is missing although shards/ holds 2 attempts.*begin anew"):
            ask()
    (tmp_path / "records").rename(commits_folder(cache))
    assert verify(cache, "deep").ok
