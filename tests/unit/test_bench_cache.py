"""``bench cache``: its formats keep what they are given, its sizes count every file, its rows are what it says."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.bench.cache import bench_cache
from megatron_kd.bench.cache_formats import RANK_TABLE, Format, OwnFormat, Piece, Stored, Targets, stored_bytes
from megatron_kd.bench.cache_measure import OPERATIONS, READ, Measurement, measure, verify
from megatron_kd.bench.cache_megatron import MegatronLM
from megatron_kd.bench.cache_parquet import Parquet
from megatron_kd.bench.cache_rows import first_slots, rows_of_cache, zigzag_pieces
from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.rank_table import build_rank_table
from megatron_kd.cache.row import Row
from megatron_kd.errors import CacheError, ConfigError
from tests.unit.cache_import_sources import zigzag_positions
from tests.unit.cache_rows import (
    assert_rows_equal,
    commit_path,
    commits_folder,
    make_cache,
    make_manifest,
    make_row,
    rank_table,
)

LENGTH, K, V = 40, 5, 64
QUIET: dict[str, Any] = {"rounds": 2, "rate_tokens": 200, "show_progress": False}
KEYS = {
    "format",
    "values_dtype",
    "top_k",
    "vocab",
    "bytes_per_token",
    "write_tokens_per_s",
    "read_tokens_per_s",
    "cp_read_tokens_per_s",
    "ordered_read_tokens_per_s",
    "spread",
    "bytes_per_token_by_part",
    "largest_value_error",
    "ratio_to_megatron_lm",
}


def some_rows(number: int = 3) -> list[Row]:
    return [make_row(i, LENGTH) for i in range(number)]


def all_formats() -> list[Format]:
    manifest = make_manifest(1, 1)
    return [
        OwnFormat("ours", "float16", rank_table(), manifest),
        OwnFormat("ours", "bfloat16", rank_table(), manifest),
        MegatronLM(),
        Parquet(K),
    ]


def test_results(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", [LENGTH] * 6, 2)
    report = bench_cache(cache=tmp_path / "cache", tokens=3 * LENGTH, **QUIET)
    assert [(row["format"], row["values_dtype"]) for row in report.results] == [
        ("ours", "float16"),
        ("ours", "bfloat16"),
        ("ours_plain_ids", "float16"),
        ("megatron_lm", "float16"),
        ("parquet", "float16"),
    ]
    for row in report.results:
        assert set(row) == KEYS
        assert (row["top_k"], row["vocab"]) == (K, V)
        assert row["bytes_per_token"] == pytest.approx(sum(row["bytes_per_token_by_part"].values()))
        assert set(row["spread"]) == set(OPERATIONS)
        for name, (lowest, highest) in row["spread"].items():
            assert 0 < lowest <= row[f"{name}_tokens_per_s"] <= highest
        assert (row["largest_value_error"] > 0) == (row["values_dtype"] == "bfloat16")
        assert row["largest_value_error"] <= 2**-8
    assert set(report.results[3]["ratio_to_megatron_lm"].values()) == {1.0}
    found = report.to_json()
    assert found["targets"]["tokens"] == 3 * LENGTH and found["targets"]["rate_tokens"] == 240
    assert found["rank_table"]["bytes"] == 4 * V and found["rank_table"]["counted_positions"] == 3 * LENGTH
    text = report.text()
    assert f"{3 * LENGTH} tokens (3 rows of {LENGTH}), top {K}, vocabulary {V}" in text
    assert all(row["format"] in text for row in report.results)


@pytest.mark.parametrize("stored_as", all_formats(), ids=lambda kind: f"{kind.name}-{kind.values_dtype}")
def test_every_format_gives_back_what_it_was_given(stored_as: Format, tmp_path: Path) -> None:
    rows = some_rows()
    stored_as.write(tmp_path / "a", rows)
    stored = stored_as.open(tmp_path / "a")
    error = verify(stored_as, stored, rows)
    assert error == 0 if stored_as.values_dtype == "float16" else 2**-10 < error <= 2**-8
    used = rows[2].ids >= 0
    assert np.array_equal(stored.read(2).ids[used], rows[2].ids[used])


def test_own_bytes_are_those_that_inspect_counts(tmp_path: Path) -> None:
    own = all_formats()[0]
    own.write(tmp_path / "a", some_rows())
    sizes = stored_bytes(own, tmp_path / "a")
    files = {file.name: file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file()}
    assert sum(sizes.values()) == sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file())
    assert sizes.pop(RANK_TABLE) == 4 * V
    seen = inspect(tmp_path / "a")
    assert sum(sizes.values()) == seen["bytes"] + files["cache.json"]
    assert {"rank", "logprob_delta", "tail_logmass", "tokens", "loss_mask", "metadata", "commit_record"} <= set(sizes)


@dataclass(frozen=True)
class Faulty:
    """Parquet, read with one fault."""

    fault: str
    parquet: Parquet
    name = "parquet"
    values_dtype = "float16"
    remark = ""

    def write(self, folder: Path, rows: Sequence[Row]) -> None:
        self.parquet.write(folder, rows)

    def open(self, folder: Path) -> Stored:
        return FaultyRows(self.parquet.open(folder), self.fault)

    def part_of(self, file: Path) -> str:
        return self.parquet.part_of(file)


class FaultyRows:
    def __init__(self, stored: Stored, fault: str) -> None:
        self.stored, self.fault = stored, fault

    def read(self, row: int) -> Targets:
        found = self.stored.read(row)
        if row != 1 or self.fault not in ("ids", "logprobs", "tail_logmass", "tokens"):
            return found
        changed = getattr(found, self.fault).copy()
        changed[3] = -2.5 if changed.dtype.kind == "f" else 1
        return found._replace(**{self.fault: changed})

    def read_pieces(self, row: int, pieces: Sequence[Piece]) -> list[Targets]:
        whole = self.read(row)
        found = [whole.cut(start, stop) for start, stop in pieces]
        return [found[0].cut(1, len(found[0].ids)), found[1]] if self.fault == "slice" else found

    def read_in_order(self) -> Iterator[Targets]:
        rows = list(self.stored.read_in_order())
        if self.fault == "order":
            rows.reverse()
        return iter(rows[:-1] if self.fault == "missing" else [*rows, rows[0]] if self.fault == "more" else rows)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ids", "row 1: ids differ"),
        ("logprobs", "changes values by"),
        ("tail_logmass", "row 1: tail_logmass differ"),
        ("tokens", "row 1: tokens differ"),
        ("slice", r"row 0: ids of the slice \[0, 10\) is not that of the row"),
        ("order", "row 0: ids differ"),
        ("missing", "row 2 is missing"),
        ("more", "more than 3 rows"),
    ],
)
def test_wrong_answers_are_not_measured(fault: str, words: str, tmp_path: Path) -> None:
    verify(Parquet(K), written(Parquet(K), tmp_path / "good"), some_rows())
    with pytest.raises(CacheError, match=words):
        measure([Faulty(fault, Parquet(K))], some_rows(), some_rows(), 1, tmp_path, lambda units=1, note="": None)


def written(stored_as: Format, folder: Path) -> Stored:
    stored_as.write(folder, some_rows())
    return stored_as.open(folder)


def test_ratios_are_medians_over_rounds() -> None:
    mine, theirs = Measurement(), Measurement()
    mine.rates[READ], theirs.rates[READ] = [10.0, 40.0, 90.0], [10.0, 20.0, 100.0]
    assert mine.median(READ) == 40 and mine.ratio(READ, theirs) == 1.0
    mine.parts = {"rank": 5, RANK_TABLE: 100, "metadata": 2}
    assert mine.bytes == 7


def test_rows_are_measured_or_counted_never_both(tmp_path: Path) -> None:
    _, rows = make_cache(tmp_path / "cache", [LENGTH] * 9, 4)
    taken = rows_of_cache(tmp_path / "cache", "here", tokens=4 * LENGTH, top_k=None)
    assert taken.tokens == 4 * LENGTH and len(taken.measured) == 4 and len(taken.counted) == 5
    originals = [row.tokens.tobytes() for row in (*taken.measured, *taken.counted)]
    assert sorted(originals) == sorted(row.tokens.tobytes() for row in rows)
    again = rows_of_cache(tmp_path / "cache", "here", tokens=4 * LENGTH, top_k=None)
    for one, other in zip(taken.measured, again.measured, strict=True):
        assert_rows_equal(one, other)
    assert [row.sample_id for row in taken.measured] == [0, 1, 2, 3]
    counts = np.bincount(np.concatenate([row.tokens for row in rows]), minlength=V)
    counted = np.concatenate([row.ids for row in taken.counted])
    assert np.array_equal(taken.rank_table(), build_rank_table(counts, counted))
    assert not np.array_equal(taken.rank_table(), taken.rank_table(in_sample=True))


@pytest.mark.parametrize(("rows", "measured", "counted"), [(1, 1, 0), (2, 1, 1), (4, 3, 1), (8, 6, 2)])
def test_a_small_cache_is_shared(rows: int, measured: int, counted: int, tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", [LENGTH] * rows, rows)
    taken = rows_of_cache(tmp_path / "cache", "here", tokens=10_000, top_k=None)
    assert (len(taken.measured), len(taken.counted)) == (measured, counted)
    report = bench_cache(cache=tmp_path / "cache", **QUIET)
    assert report.rank_table["in_sample"] is (counted == 0)
    assert any("counted from the measured positions" in note for note in report.notes) is (counted == 0)


def test_an_unfinished_cache_of_rows_of_other_lengths(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "cache", [30, 41, 20, 50, 33, 47], 2)
    commit_path(cache, 1).unlink()
    taken = rows_of_cache(tmp_path / "cache", "here", tokens=10_000, top_k=None)
    assert sorted(map(len, (*taken.measured, *taken.counted))) == [30, 33, 41, 47]
    bench_cache(cache=tmp_path / "cache", **QUIET)


def test_first_slots() -> None:
    """A row cut to fewer slots is the row that a capture with that K would have stored."""
    whole, fewer = make_row(3, LENGTH, top_k=9, unused=False), make_row(3, LENGTH, top_k=4, unused=False)
    cut = first_slots(whole, 4)
    assert np.abs(cut.tail_logmass - fewer.tail_logmass).max() < 2e-3  # the values that join the tail are rounded
    for found, wanted in ((replace(cut, tail_logmass=fewer.tail_logmass), fewer), (first_slots(whole, 9), whole)):
        assert not found.log_normalizers.size and not found.tail_logmass_extra.size
        empty = wanted.log_normalizers
        assert_rows_equal(replace(found, log_normalizers=empty, tail_logmass_extra=empty), wanted)


def test_fewer_slots_and_one_temperature(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", [LENGTH] * 4, 4, temperatures=(1.0, 2.0), value_dtype="float32")
    report = bench_cache(cache=tmp_path / "cache", top_k=3, **QUIET)
    assert {row["top_k"] for row in report.results} == {3}
    assert {"tail_logmass"} == {name for name in report.results[0]["bytes_per_token_by_part"] if "mass" in name}
    assert {
        "the cache holds float32 values, which are rounded to float16 here",
        "only the first temperature is kept here",
    } <= set(report.notes)


@pytest.mark.parametrize("length", [16, 64])
def test_slices_are_the_zigzag(length: int) -> None:
    for rank in range(2):
        pieces = zigzag_pieces(length, rank)
        assert [i for start, stop in pieces for i in range(start, stop)] == zigzag_positions(length, 2, rank)


@pytest.mark.parametrize("length", [4, 5, 41, 2047])
def test_slices_of_odd_rows_cover_them(length: int) -> None:
    pieces = [piece for rank in range(2) for piece in zigzag_pieces(length, rank)]
    assert sorted(i for start, stop in pieces for i in range(start, stop)) == list(range(length))
    assert all(start < stop for start, stop in pieces)


def test_a_vocabulary_beyond_17_bits_leaves_megatron_lm_out(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", [8] * 2, 2, vocab_size=2**17 + 1)
    report = bench_cache(cache=tmp_path / "cache", **QUIET)
    assert "megatron_lm" not in {row["format"] for row in report.results}
    assert any("megatron_lm is left out" in note and "131,073 does not fit" in note for note in report.notes)
    assert all(row["ratio_to_megatron_lm"] is None for row in report.results)
    assert "–" in report.text()


def test_temporary_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(tmp_path / "cache", [LENGTH] * 2, 2)
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    bench_cache(cache=tmp_path / "cache", **QUIET)
    assert list(place.iterdir()) == []
    with pytest.raises(CacheError, match="is not a cache"):
        bench_cache(cache=tmp_path, **QUIET)
    assert list(place.iterdir()) == []


def test_bad_input(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", [LENGTH] * 2, 2)
    make_cache(tmp_path / "bf16", [LENGTH] * 2, 2, value_dtype="bfloat16")
    make_cache(tmp_path / "short", [3] * 2, 2)
    cache, _ = make_cache(tmp_path / "empty", [LENGTH], 1)
    shutil.rmtree(commits_folder(cache))
    commits_folder(cache).mkdir()
    for words, options in (
        ("top-k is 6, .* holds 5 tokens", {"cache": tmp_path / "cache", "top_k": 6}),
        ("top-k is 0, must be positive", {"cache": tmp_path / "cache", "top_k": 0}),
        ("rounds is 0", {"cache": tmp_path / "cache", "rounds": 0}),
        ("holds bfloat16 values", {"cache": tmp_path / "bf16"}),
        ("has 3 tokens, slices need 4", {"cache": tmp_path / "short"}),
        ("no committed shard", {"cache": tmp_path / "empty"}),
        ("row-length is 3, must be at least 4", {"row_length": 3}),
        ("already has its rows", {"cache": tmp_path / "cache", "recipe": "recipe.yaml"}),
        ("already has its rows", {"cache": tmp_path / "cache", "row_length": 64}),
    ):
        with pytest.raises(ConfigError, match=words):
            bench_cache(**{**QUIET, **options})
