"""Damage is found: by reading where a row would be wrong, by verify wherever it is."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron_kd.cache.writer as writer_module
from megatron_kd.cache.commits import discard_shard, read_commit
from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.verify import LEVELS, verify
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError
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


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Cache, list[Row]]:
    return make_cache(tmp_path / "c", [300, 1, 700, 20, 600, 9], 3, temperatures=(1.0, 2.0))


def _folder(cache: Cache, shard: int) -> Path:
    return shards_folder(cache) / read_commit(cache, shard).attempt


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _recommit(cache: Cache, shard: int, **change: Any) -> None:
    record = replace(read_commit(cache, shard), **change)
    commit_path(cache, shard).write_text(record.to_json())


def _error_of_reading(reader: CacheReader, row: Row) -> str:
    """The message where reading fails; otherwise the row must be right."""
    try:
        found = reader.read(row.sample_id, row.hash)
    except CacheError as error:
        return str(error)
    assert_rows_equal(found, row)
    return ""


def test_whole_cache_has_no_problem(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    for level in LEVELS:
        report = verify(folder_of(cache), level, show_progress=True)
        assert report.problems == [] and report.ok
        assert (report.shards_committed, report.rows_committed, report.orphans) == (2, 6, [])
        assert report.tokens == sum(map(len, rows))
        on_disk = sum(file.stat().st_size for file in shards_folder(cache).rglob("*") if file.is_file())
        assert report.bytes == on_disk
        assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    with pytest.raises(ValueError, match="'all' must be one of inventory, structure, crc, deep"):
        verify(cache, "all")  # type: ignore[arg-type]


def test_every_flipped_bit_is_found(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    rng = np.random.default_rng(0)
    files = [file for file in sorted(_folder(cache, 1).rglob("*")) if file.is_file()]
    assert len(files) == 21
    for file in [*files, *files]:
        good = file.read_bytes()
        _flip(file, int(rng.integers(0, 8 * len(good))))
        report = verify(cache, "crc")
        assert any(str(file) in problem or str(file.parent) in problem for problem in report.problems), file
        reader = CacheReader(cache)
        for row in rows:
            error = _error_of_reading(reader, row)
            assert not error or (row.sample_id >= 3 and f"sample {row.sample_id} of" in error)
            assert not error or str(file.parent) in error
        file.write_bytes(good)
    assert verify(cache, "deep").ok


@pytest.mark.parametrize("name", ["rank/c.0.0", "logprob_delta/c.0.0", "tokens/c.0", "sample_offsets/c.0"])
def test_truncated_file(whole: tuple[Cache, list[Row]], name: str) -> None:
    cache, rows = whole
    file = _folder(cache, 1) / name
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CacheError, match=rf"sample 4 .*{re.escape(name)} has \d+ bytes, its commit record says \d+"):
        CacheReader(cache).read(4)
    assert_rows_equal(CacheReader(cache).read(0), rows[0])
    (problem,) = verify(cache, "inventory").problems
    assert name in problem


def test_truncated_while_open(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    reader = CacheReader(cache)
    reader.read(5)
    file = _folder(cache, 1) / "rank" / "c.0.0"
    with open(file, "r+b") as opened:
        opened.truncate(200)
    with pytest.raises(CacheError, match=r"sample 4 .*rank/c\.0\.0 is truncated"):
        reader.read(4)


def test_damaged_chunk_names_row_file_and_positions(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    _flip(_folder(cache, 0) / "rank" / "c.0.0", 8 * 40)
    reader = CacheReader(cache)
    with pytest.raises(CacheError, match=r"sample 0 .*rank/c\.0\.0: inner chunk 0 \(elements 0 to 255\) fails its crc"):
        reader.read(0)
    assert_rows_equal(reader.read(2), rows[2])  # other chunks are good


def test_damaged_index(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    file = _folder(cache, 1) / "logprob_delta" / "c.0.0"
    for byte in (-1, -3, -20):  # the checksum, and an entry it covers
        good = file.read_bytes()
        _flip(file, 8 * (len(good) + byte))
        with pytest.raises(CacheError, match=r"sample 3 .*c\.0\.0: the shard index fails its crc32c"):
            CacheReader(cache).read(3)
        assert any("index fails its crc32c" in problem for problem in verify(cache, "structure").problems)
        file.write_bytes(good)


def test_deleted_files(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    (_folder(cache, 0) / "tokens" / "zarr.json").unlink()
    shutil.rmtree(_folder(cache, 1))
    problems = verify(cache, "deep").problems
    assert any("tokens/zarr.json" in problem and "the disk nothing" in problem for problem in problems)
    assert any(str(_folder(cache, 1)) in problem for problem in problems)
    for sample in (0, 3):
        with pytest.raises(CacheError, match=rf"sample {sample} .*cannot be opened"):
            CacheReader(cache).read(sample)


def test_holes_strangers_and_leftovers(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    commit_path(cache, 0).unlink()
    shutil.copy(commit_path(cache, 1), commit_path(cache, 7))
    (_folder(cache, 1) / "notes.txt").write_text("x")
    (commits_folder(cache) / ".000000.json.ab.tmp").write_text("{")
    report = verify(cache, "inventory")
    text = "\n".join(report.problems)
    assert "samples 0–2 are missing: shard 0 was never committed" in text
    assert "commits/000007.json is no record of this cache, which has shards 0 to 1" in text
    assert "notes.txt" in text
    assert (report.shards_committed, report.rows_committed) == (1, 3)


def test_leftovers_are_listed_and_are_no_problem(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    (shards_folder(cache) / "000001-beaten" / "rank").mkdir(parents=True)
    (folder_of(cache) / ".cache.json.ab.tmp").write_text("{")
    report = verify(cache, "structure")
    assert report.ok
    assert report.orphans == ["shards/000001-beaten", ".cache.json.ab.tmp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is damaged"), ("{}", "is damaged"), ("[1]", "is damaged"), ('{"rows": 3', "is damaged")],
)
def test_damaged_record(whole: tuple[Cache, list[Row]], text: str, message: str) -> None:
    cache, _ = whole
    commit_path(cache, 0).write_text(text)
    with pytest.raises(CacheError, match=rf"sample 1 .*000000\.json {message}.*`megatron-kd capture --repair`"):
        CacheReader(cache).read(1)
    assert not verify(cache, "inventory").ok
    assert verify(cache, "crc").damaged_attempts == [""] and discard_shard(cache, 0, "")
    assert write_shard(cache, 0, [make_row(s, n, temperatures=(1.0, 2.0)) for s, n in enumerate((300, 1, 700))])
    assert verify(cache, "deep").ok


def test_what_another_job_repaired_meanwhile_is_kept(whole: tuple[Cache, list[Row]]) -> None:
    """Two jobs find the same damage; one has captured the shards again before the other takes out what it found."""
    cache, rows = whole
    _flip(_folder(cache, 0) / "rank" / "c.0.0", 8 * 40)
    commit_path(cache, 1).write_text("{")
    found = verify(cache, "crc")
    assert found.damaged_shards == [0, 1] and found.damaged_attempts == [read_commit(cache, 0).attempt, ""]
    for shard, attempt in zip(found.damaged_shards, found.damaged_attempts, strict=True):
        assert discard_shard(cache, shard, attempt)
        assert not discard_shard(cache, shard, attempt), "it is gone"
        assert write_shard(cache, shard, [rows[sample] for sample in cache.manifest.shard_samples(shard)])
        assert not discard_shard(cache, shard, attempt), "this one was not found damaged"
    assert verify(cache, "deep").ok
    assert sorted(path.name for path in commits_folder(cache).iterdir()) == ["000000.json", "000001.json"]


def test_a_record_that_cannot_be_read_is_not_called_damaged(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    commit_path(cache, 0).unlink()
    commit_path(cache, 0).symlink_to(commit_path(cache, 0).name)  # ELOOP
    with pytest.raises(CacheError) as caught:
        CacheReader(cache).read(1)
    assert str(caught.value).endswith("000000.json cannot be read: Too many levels of symbolic links")


def test_the_record_of_an_import_is_removed_by_hand(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [4, 5], 1, teacher={"name": "x", "matched_by": "tokens"})
    commit_path(cache, 1).write_text("{}")
    with pytest.raises(CacheError, match=r"is damaged: .*; remove it and run `megatron-kd cache import` again"):
        CacheReader(cache).read(1)


def test_swapped_rows_are_found_by_their_hashes(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    record = read_commit(cache, 0)
    _recommit(cache, 0, row_hashes=record.row_hashes[::-1])
    with pytest.raises(CacheError, match=r"sample 0 .* do not have the row hash"):
        CacheReader(cache).read(0)
    _recommit(cache, 0, row_hashes=record.row_hashes, content_hashes=record.content_hashes[::-1])
    CacheReader(cache).read(0)
    assert verify(cache, "crc").ok
    problems = verify(cache, "deep").problems
    assert [problem.split(" in ")[0] for problem in problems] == ["sample 0", "sample 2"]
    # The directory of another shard is refused by its name, and under a name of this one by its attributes.
    _recommit(cache, 1, attempt=record.attempt, objects=record.objects)
    assert any("does not have the fields of shard 1" in problem for problem in verify(cache, "inventory").problems)
    moved = "000001" + record.attempt[6:]
    shutil.copytree(shards_folder(cache) / record.attempt, shards_folder(cache) / moved)
    text = commit_path(cache, 1).read_text().replace(record.attempt, moved)
    commit_path(cache, 1).write_text(text)
    assert any("has other attributes" in problem for problem in verify(cache, "structure").problems)


def test_structure_finds_other_metadata(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    file = _folder(cache, 0) / "tail_logmass" / "zarr.json"
    text = file.read_text()
    file.write_text(text.replace('"fill_value": 0', '"fill_value": 1'))
    assert verify(cache, "inventory").ok
    (problem,) = verify(cache, "structure").problems
    assert "tail_logmass/zarr.json" in problem
    file.write_text(text.replace('"float32"', '"int32"  '))
    assert any("describes" in problem and "<i4" in problem for problem in verify(cache, "structure").problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, logprobs=np.where(r.ids == r.ids[33, 1], np.nan, r.logprobs)), "NaN"),
        (lambda r: replace(r, ids=np.where(r.ids == r.ids[33, 1], r.ids[33, 0], r.ids)), "names an id twice"),
        (lambda r: replace(r, tail_logmass=np.where(np.arange(50) == 33, -0.01, r.tail_logmass)), "position 33 add up"),
        (lambda r: replace(r, tokens=r.tokens + np.int32(64)), "outside the vocabulary"),
    ],
)
def test_deep_finds_what_another_program_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(2, 1), rank_table())
    write_shard(cache, 0, [make_row(0, 50)])
    # Our writer without its checks stands for a program that has none.
    monkeypatch.setattr(writer_module, "check_row", lambda *_, **__: None)
    monkeypatch.setattr(writer_module, "check_mass", lambda *_, **__: None)
    write_shard(cache, 1, [change(make_row(1, 50))])
    assert verify(cache, "crc").ok
    (problem,) = verify(cache, "deep").problems
    assert problem.startswith("sample 1") and message in problem


def test_inspect(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    summary = json.loads(json.dumps(inspect(folder_of(cache))))
    tokens = sum(map(len, rows))
    assert (summary["complete"], summary["missing_samples"]) == (True, "")
    assert (summary["rows"], summary["tokens"], summary["top_k"]) == (6, tokens, 5)
    files = [file for folder in (shards_folder(cache), commits_folder(cache)) for file in folder.rglob("*.*")]
    on_disk = sum(file.stat().st_size for file in files if file.is_file())
    assert summary["bytes"] == on_disk
    assert summary["bytes_per_token"] == pytest.approx(on_disk / tokens)
    assert summary["teacher"] == {"name": "teacher", "sha256": "12ab"}
    mass = np.concatenate([np.exp(r.logprobs.astype("f8")).sum(-1)[r.loss_mask == 1] for r in rows])
    assert summary["top_k_mass"]["positions"] == len(mass)
    assert summary["top_k_mass"]["mean"] == pytest.approx(mass.mean(), abs=1e-3)
    assert sum(summary["top_k_mass"]["histogram"]) == pytest.approx(1)
    commit_path(cache, 0).unlink()
    summary = inspect(cache)
    assert (summary["complete"], summary["missing_samples"], summary["rows_committed"]) == (False, "0–2", 3)
    commit_path(cache, 1).unlink()
    summary = inspect(cache)
    assert (summary["bytes_per_token"], summary["top_k_mass"]) == (None, None)
