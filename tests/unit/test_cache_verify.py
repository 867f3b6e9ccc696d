"""Verify in parallel: the same report by any number of workers, every byte looked at once, holes told from damage."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from megatron_kd.cache import checks, workers
from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.cache.checks import Check, ShardChecker
from megatron_kd.cache.clean import clean
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.verify import LEVELS, Level, verify
from megatron_kd.cache.writer import write_shard
from tests.unit.cache_rows import (
    commit_path,
    commits_folder,
    make_cache,
    make_manifest,
    make_row,
    rank_table,
    shards_folder,
)


def _folder(cache: Cache, shard: int) -> Path:
    return shards_folder(cache) / read_commit(cache, shard).attempt


def _flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def _recommit(cache: Cache, shard: int, **change: Any) -> None:
    record = replace(read_commit(cache, shard), **change)
    commit_path(cache, shard).write_text(record.to_json())


@pytest.fixture
def damaged(tmp_path: Path) -> Cache:
    """Ten shards of three rows, of which 2, 3, 5, 6 and 7 are damaged, each in another way, and 9 is missing."""
    cache, _ = make_cache(tmp_path / "c", [70, 300, 5] * 10, 3, temperatures=(1.0, 2.0))
    _flip(_folder(cache, 2) / "rank" / "c.0.0", 30)
    _flip(_folder(cache, 2) / "loss_mask" / "c.0", 20)
    commit_path(cache, 3).write_text("{")
    _recommit(cache, 5, content_hashes=read_commit(cache, 5).content_hashes[::-1])
    (_folder(cache, 6) / "tokens" / "zarr.json").unlink()
    _flip(_folder(cache, 7) / "tail_logmass" / "c.0", -3)  # its index
    commit_path(cache, 9).unlink()
    return cache


@pytest.mark.parametrize(
    ("level", "shards"),
    [("inventory", [3, 6]), ("structure", [3, 6, 7]), ("crc", [2, 3, 6, 7]), ("deep", [2, 3, 5, 6, 7])],
)
def test_the_report_is_the_same_for_any_number_of_workers(damaged: Cache, level: Level, shards: list[int]) -> None:
    alone = verify(damaged, level)
    assert alone.damaged_shards == shards
    assert (alone.missing_samples, alone.shards_committed, alone.rows_committed) == ("27–29", 8, 24)
    assert len(alone.orphans) == 0  # with a record that cannot be read nobody knows which they are
    for count in (2, 3):
        assert verify(damaged.location, level, workers=count) == alone
    lines = iter(alone.problems)
    assert "samples 27–29 are missing" in next(lines)
    if level in ("crc", "deep"):
        assert "loss_mask/c.0: inner chunks 0 " in next(lines)
        assert "rank/c.0.0: inner chunks 0 (of 256 elements each) fail their crc32c" in next(lines)
    assert "000003.json is damaged" in next(lines)
    if level == "deep":
        assert [next(lines).split(" in ")[0] for _ in range(2)] == ["sample 15", "sample 17"]
    assert "tokens/zarr.json: the commit record has" in next(lines)
    if level != "inventory":
        assert "tail_logmass/c.0: the shard index fails its crc32c" in next(lines)
    assert list(lines) == []


_opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


def test_only_the_shards_asked_for_are_read(damaged: Cache) -> None:
    global _opened
    sys.addaudithook(_note)
    _opened = []
    report = verify(damaged, "deep", shards=range(3, 6))
    opened, _opened = _opened, None
    assert report.damaged_shards == [3, 5] and report.missing_samples == ""
    assert (report.shards_expected, report.rows_expected, report.shards_committed) == (3, 9, 2)
    names = [Path(path).relative_to(damaged.location).parts for path in opened if path.startswith(damaged.location)]
    assert {name[1][:6] for name in names if name[0] in ("commits", "shards")} == {"000003", "000004", "000005"}
    holes = verify(damaged, "inventory", shards=[9, 0, 0])
    assert holes.missing_samples == "27–29" and holes.damaged_shards == [] and holes.shards_expected == 2
    assert verify(damaged, "deep", shards=[]).ok
    for wrong in ([10], [-1, 3]):
        with pytest.raises(ValueError, match=r"shards must lie in \[0, 10\), not "):
            verify(damaged, shards=wrong)


def test_the_order_in_which_results_arrive_does_not_matter(damaged: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {level: verify(damaged, level) for level in LEVELS}
    chance = random.Random(3)

    def shuffled(tasks: Any, prepare: Any, done: Any, count: int) -> None:
        waiting, work = list(tasks), prepare()
        while waiting:
            task = waiting.pop(chance.randrange(len(waiting)))
            waiting += done(task, work(task))

    monkeypatch.setattr("megatron_kd.cache.verify.run_tasks", shuffled)
    for level in LEVELS * 3:
        assert verify(damaged, level) == wanted[level]


def test_a_running_capture_has_holes_and_no_damage(tmp_path: Path) -> None:
    cache = create_cache(tmp_path / "c", make_manifest(6, 2), rank_table())
    write_shard(cache, 1, [make_row(2, 30), make_row(3, 40)])
    (shards_folder(cache) / "000002-of-another-rank").mkdir()
    report = verify(cache, "deep")
    assert (report.ok, report.damaged_shards, report.missing_samples) == (False, [], "0–1, 4–5")
    assert report.problems == ["samples 0–1, 4–5 are missing: shards 0, 2 were never committed"]
    assert report.orphans == ["shards/000002-of-another-rank"]
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["ok"], found["damaged_shards"], found["missing_samples"]) == (False, [], "0–1, 4–5")


def test_text_says_what_is_damaged_and_what_is_missing(damaged: Cache) -> None:
    head, *lines = verify(damaged, "crc").text().splitlines()
    assert head.startswith(
        "shards 2–3, 6–7 are damaged; incomplete, samples 27–29 are missing at level crc (24 rows of "
    )
    assert lines == verify(damaged, "crc").problems


def test_text_of_a_cache_with_records_of_another(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [70], 1)
    assert verify(cache).text().startswith("no problem found at level structure (1 rows of 70 tokens, ")
    shutil.copy(commit_path(cache, 0), commit_path(cache, 4))
    report = verify(cache)
    assert (report.ok, report.damaged_shards, report.missing_samples) == (False, [], "")
    assert report.text().startswith("there are other problems at level structure")
    [problem] = report.problems
    stray = commit_path(cache, 4)
    assert problem.startswith(f"{stray} is no record of this cache, which has shards 0 to 0: remove it, or let")
    assert report.orphans == ["commits/000004.json"]
    shutil.copy(stray, commits_folder(cache) / "0000000.json")  # a number of seven digits is nobody's name either
    assert [leftover.name for leftover in clean(cache, 0.0).removed] == ["commits/0000000.json", "commits/000004.json"]
    assert verify(cache, "deep").ok and commit_path(cache, 0).exists()


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("array", ["tail_logmass", "tail_logmass_extra", "log_normalizers"])
def test_mass_is_checked_at_every_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_dtype: str, array: str
) -> None:
    """A single position off by a little more than rounding explains, written by a program that does not look."""
    temperatures = (1.0, 3.0)
    cache = create_cache(
        tmp_path / "c", make_manifest(2, 2, value_dtype=value_dtype, temperatures=temperatures), rank_table()
    )
    dtype = "float16" if value_dtype == "float16" else "float32"
    good, bad = (make_row(sample, 90, dtype=dtype, temperatures=temperatures) for sample in (0, 1))
    values = getattr(bad, array).copy()
    values[..., 77] -= {"float16": 0.05, "bfloat16": 0.3, "float32": 0.01}[value_dtype]
    monkeypatch.setattr("megatron_kd.cache.writer.check_mass", lambda *_, **__: None)
    write_shard(cache, 0, [good, replace(bad, **{array: values})])
    assert verify(cache, "crc").ok
    (problem,) = verify(cache, "deep").problems
    at = "at temperature 1 " if array == "tail_logmass" else "at temperature 3 "
    assert problem.startswith("sample 1 ") and at in problem and "of position 77 add up to" in problem


@pytest.fixture
def one_shard(tmp_path: Path) -> tuple[Cache, list[int]]:
    """A single shard of 40 rows of uneven lengths."""
    lengths = np.random.default_rng(1).integers(1, 900, 40).tolist()
    cache, _ = make_cache(tmp_path / "c", lengths, 40, temperatures=(1.0, 0.5))
    return cache, lengths


def test_a_large_shard_is_spread(one_shard: tuple[Cache, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, lengths = one_shard
    monkeypatch.setattr(checks, "_TASK_SLOTS", 5 * 1000)
    monkeypatch.setattr(checks, "_TASK_BYTES", 20_000)
    found = ShardChecker(cache, "deep")(Check(0))
    assert found.problems == []
    rows = [part.rows for part in found.rows]
    assert [row for start, stop in rows if start is not None for row in range(start, stop)] == list(range(40))  # type: ignore[misc]
    positions = [sum(lengths[start:stop]) for start, stop in rows]  # type: ignore[misc]
    assert len(rows) > 8 and max(positions) < 1000 + max(lengths)
    record = read_commit(cache, 0)
    names = [name for part in found.files for name, _ in part.files]
    assert names == sorted(record.objects) and len(found.files) >= 3
    assert sum(part.weight for part in found.files) == record.stored_bytes
    assert verify(cache, "deep", workers=2).ok


def test_checks_that_are_done_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of many shards has millions of them; only those of shards under work may be in memory."""
    cache, _ = make_cache(tmp_path / "c", [300] * 40, 4)
    _flip(_folder(cache, 3) / "rank" / "c.0.0", 30)  # its rows are never looked at
    monkeypatch.setattr(checks, "_TASK_SLOTS", 1)
    monkeypatch.setattr(checks, "_TASK_BYTES", 1)
    seen: list[int] = []
    call = ShardChecker.__call__

    def counted(checker: ShardChecker, check: Check) -> Any:
        if check.rows is None and not check.files:
            gc.collect()
            seen.append(sum(isinstance(value, Check) for value in gc.get_objects()))
        return call(checker, check)

    monkeypatch.setattr(ShardChecker, "__call__", counted)
    report = verify(cache, "deep")
    assert report.damaged_shards == [3] and len(report.problems) == 1
    assert len(seen) == 10 and max(seen) <= 3, seen


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process reads")
def test_the_crc_level_reads_each_byte_once(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [4000] * 8, 4, top_k=40)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    size = verify(cache, "inventory").bytes
    before = read()
    assert verify(cache, "crc").ok
    assert size > 1_000_000 and size <= read() - before < 1.1 * size  # records, metadata and indices more than once
    before = read()
    assert verify(cache, "deep").ok
    assert 2 * size <= read() - before < 2.2 * size  # the hash of a file has one order, rows have another


def test_the_deep_level_decodes_each_chunk_once(
    one_shard: tuple[Cache, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = one_shard
    decoded: Counter[tuple[str, int]] = Counter()
    decode = ArrayReader._decode

    def counted(array: ArrayReader, chunk: int, payload: np.ndarray, out: np.ndarray) -> None:
        decoded[array.spec.name, chunk] += 1
        decode(array, chunk, payload, out)

    monkeypatch.setattr(ArrayReader, "_decode", counted)
    assert verify(cache, "deep").ok
    chunks = {
        (name, chunk) for name in cache.manifest.arrays for chunk in range(ArrayReader(_folder(cache, 0) / name).chunks)
    }
    assert decoded == dict.fromkeys(chunks, 1) and len(chunks) > 100


def test_a_long_list_of_bad_rows_is_cut(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [3] * 60, 60)
    hashes = read_commit(cache, 0).content_hashes
    _recommit(cache, 0, content_hashes=hashes[1:] + hashes[:1])
    problems = verify(cache, "deep").problems
    assert len(problems) == 21
    assert problems[0].startswith("sample 0 in ") and problems[-1] == "40 more of the samples 0–59 are damaged"


def test_a_chunk_of_impossible_size_is_no_reason_to_take_memory(tmp_path: Path) -> None:
    """The index says that one chunk is the whole file, and its checksum is right."""
    cache, _ = make_cache(tmp_path / "c", [3000], 1)
    file = _folder(cache, 0) / "rank" / "c.0.0"
    array = ArrayReader(file.parent)
    index = array.extents().copy()
    index[0], index[1:, 0], index[1:, 1] = (0, array.size - array.index_bytes), array.size - array.index_bytes, 0
    data = index.tobytes()
    whole = file.read_bytes()[: -array.index_bytes] + data + google_crc32c.value(data).to_bytes(4, "little")
    file.write_bytes(whole)
    (problem,) = verify(cache, "structure").problems
    assert "rank/c.0.0: inner chunks 0–11 have an impossible size" in problem


def test_files_that_vanish_meanwhile_are_problems(one_shard: tuple[Cache, list[int]]) -> None:
    cache, _ = one_shard
    checker = ShardChecker(cache, "deep")
    found = checker(Check(0))
    shutil.rmtree(_folder(cache, 0))
    (problem,) = ShardChecker(cache, "deep")(found.rows[0]).problems
    assert "cannot be opened" in problem
    problems = checker(found.files[0]).problems
    assert len(problems) == len(found.files[0].files) and "No such file" in problems[0]


def test_wrong_number_of_workers(damaged: Cache) -> None:
    with pytest.raises(ValueError, match="workers is 0, must be at least 1"):
        verify(damaged, "crc", workers=0)


def test_small_caches_are_not_worth_a_process(damaged: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prepare: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers, "_start", refuse)
    assert verify(damaged, "deep", workers=None).damaged_shards
    assert verify(damaged, "inventory").damaged_shards
    with pytest.raises(AssertionError, match="a process was started"):
        verify(damaged, "inventory", workers=2)


def test_a_large_cache_takes_all_cores(damaged: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_kd.cache.verify._WORTH_A_PROCESS", 1e-9)
    taken = []
    monkeypatch.setattr("megatron_kd.cache.verify.run_tasks", lambda *arguments: taken.append(arguments[-1]))
    verify(damaged, "deep", workers=None)
    assert taken == [len(os.sched_getaffinity(0))]
