"""Clean: leftovers are listed with their sizes, those of running writers stay, shards are not touched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache.clean import clean
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.storage import LocalStorage
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans, remove_orphans
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import commit_path, folder_of, make_cache, make_manifest, shards_folder


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """With an attempt that is two days old, one that was just written to, and an old temporary file."""
    cache, _ = make_cache(tmp_path / "c", [30, 40], 1)
    for name, days in (("000000-old", 2), ("000001-new", 2)):
        (shards_folder(cache) / name / "rank").mkdir(parents=True)
        (shards_folder(cache) / name / "rank" / "c.0.0").write_bytes(bytes(1500))
        _age(shards_folder(cache) / name, days)
    (shards_folder(cache) / "000001-new" / "rank" / "c.0.0").write_bytes(bytes(10))
    (folder_of(cache) / ".cache.json.ab.tmp").write_text("{")
    _age(folder_of(cache) / ".cache.json.ab.tmp", 3)
    return cache


def _age(path: Path, days: float) -> None:
    when = time.time() - 86400 * days
    for file in (path, *path.rglob("*")):
        os.utime(file, (when, when))


def test_a_rehearsal_removes_nothing_and_says_the_same(cache: Cache) -> None:
    rehearsal = clean(folder_of(cache), dry_run=True)
    assert verify(cache).orphans == ["shards/000000-old", "shards/000001-new", ".cache.json.ab.tmp"]
    done = clean(cache)
    for report in (rehearsal, done):
        assert [(left.name, left.bytes) for left in report.removed] == [
            ("shards/000000-old", 1500),
            (".cache.json.ab.tmp", 1),
        ]
        assert [(left.name, left.bytes) for left in report.kept] == [("shards/000001-new", 10)]
        assert report.removed[0].idle_s == pytest.approx(2 * 86400, abs=60) and report.kept[0].idle_s < 60
    assert json.loads(json.dumps(done.to_dict()))["bytes"] == 1501
    verified = verify(cache, "deep")
    assert verified.ok and verified.orphans == ["shards/000001-new"]


def test_text(cache: Cache) -> None:
    assert clean(cache, dry_run=True).text().splitlines() == [
        "would remove shards/000000-old: 1.465 KiB, idle for 48.0 h",
        "would remove .cache.json.ab.tmp: 1 B, idle for 72.0 h",
        "kept shards/000001-new: 10 B, idle for 0.0 h",
        "would remove 2 leftovers of 1.466 KiB; 1 left, written to in the last 24 h",
    ]
    assert clean(cache, 0.0).text().splitlines()[-1] == "removed 3 leftovers of 1.476 KiB"
    assert clean(cache, 0.0).text() == "removed 0 leftovers of 0 B"


def test_the_table_of_a_lost_race_is_a_leftover(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [30], 1)
    lost = build_rank_table(np.arange(64))
    create_cache(cache.location, make_manifest(1, 1, rank_table_hash=rank_table_hash(lost)), lost)
    assert not orphans(cache), "whoever finds a cache leaves no table"
    name = f"rank_table-{rank_table_hash(lost)}.u32"
    (folder_of(cache) / name).write_bytes(lost.tobytes())
    assert orphans(cache) == [name] and not clean(cache).removed
    _age(folder_of(cache) / name, 2)
    assert [(left.name, left.bytes) for left in clean(cache).removed] == [(name, 256)]
    assert not orphans(cache) and verify(cache.location, "deep").ok


def test_with_a_damaged_record_nothing_is_removed(cache: Cache) -> None:
    commit_path(cache, 0).write_text("{")
    with pytest.raises(CacheError, match=r"000000\.json is damaged"):
        clean(cache, 0.0)
    assert (shards_folder(cache) / "000000-old").exists()
    with pytest.raises(ValueError, match="idle_s is -1"):
        clean(cache, -1)


def test_an_attempt_that_is_committed_meanwhile_stays(tmp_path: Path) -> None:
    """Its writer stood still for days and goes on while other leftovers are removed."""
    made, _ = make_cache(tmp_path / "c", [30, 40], 1)
    record = commit_path(made, 1).read_bytes()
    commit_path(made, 1).unlink()
    (shards_folder(made) / "000000-old").mkdir()
    for attempt in shards_folder(made).iterdir():
        _age(attempt, 2)

    class Slow(LocalStorage):
        def last_written(self, name: str) -> float | None:
            commit_path(made, 1).write_bytes(record)
            return super().last_written(name)

    assert len(orphans(made)) == 2
    assert remove_orphans(Cache(Slow(folder_of(made)), made.manifest, made.rank_table)) == ["shards/000000-old"]
    assert verify(made, "deep").ok
