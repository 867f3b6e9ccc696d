"""Inspect: figures that add up, text that is safe to print, and what is damaged does not hide the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.inspect import inspect, spread_samples
from megatron_kd.cache.inspect_text import inspect_text
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache
from megatron_kd.cache.text import printable, size_text
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import commit_path, folder_of, make_cache, shards_folder


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Cache, list[Row]]:
    return make_cache(
        tmp_path / "c",
        [300, 1, 700, 20, 600, 9],
        3,
        temperatures=(1.0, 2.0),
        teacher={"name": "mentor\x1b[31m", "architecture": {"layers": 4, "hidden": 64}},
        tokenizer={"name": "letters", "sha256": "ab"},
        library_versions={"numpy": "2.0"},
    )


def test_the_parts_add_up(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    seen = json.loads(json.dumps(inspect(folder_of(cache))))
    assert sum(seen["bytes_per_token_by_array"].values()) == pytest.approx(seen["bytes_per_token"])
    on_disk = sum(commit_path(cache, shard).stat().st_size for shard in (0, 1))
    assert seen["bytes_per_token_by_array"]["commits"] == pytest.approx(on_disk / sum(map(len, rows)))
    assert seen["problems"] == []


def test_text(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    seen = inspect(cache)
    lines = inspect_text(seen).splitlines()
    assert lines[0] == f"{folder_of(cache)}: complete"
    text = "\n".join(lines)
    assert f"rows          6 of 6, {sum(map(len, rows)):,} tokens" in text
    assert "targets       top 5 of 64 as float16" in text and "temperatures  1, 2" in text
    assert "mentor\\x1b[31m" in text and "layers 4, hidden 64" in text and "letters" in text and "numpy  2.0" in text
    assert f"bytes per token: {seen['bytes_per_token']:.1f}" in text
    mass = seen["top_k_mass"]
    start = next(i for i, line in enumerate(lines) if line.startswith("probability of the top 5"))
    assert f"{mass['mean']:.4f} in the mean of {mass['positions']:,} positions of 6 rows" in lines[start]
    bars = lines[start + 1 : start + 8]
    for line, share in zip(bars, mass["histogram"], strict=True):
        assert f"{share:.1%}" in line
        assert abs(line.count("█") - 40 * share) <= 1
    assert max(map(len, lines)) <= 120 and all(map(str.isprintable, lines))


def test_text_of_an_incomplete_and_an_empty_cache(whole: tuple[Cache, list[Row]]) -> None:
    cache, _ = whole
    commit_path(cache, 0).unlink()
    assert "incomplete, samples 0–2 are missing" in inspect_text(inspect(cache))
    commit_path(cache, 1).unlink()
    text = inspect_text(inspect(cache))
    assert "rows          0 of 6, 0 tokens" in text
    assert "bytes per token" not in text and "probability" not in text


def test_a_damaged_row_does_not_hide_the_rest(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    file = shards_folder(cache) / read_commit(cache, 0).attempt / "rank" / "c.0.0"
    data = bytearray(file.read_bytes())
    data[40] ^= 1  # the first chunk: samples 0
    file.write_bytes(data)
    seen = inspect(cache)
    (problem,) = seen["problems"]
    assert "sample 0 of" in problem and "fails its crc32c" in problem
    mass = np.concatenate([-np.expm1(r.tail_logmass.astype("f8"))[r.loss_mask == 1] for r in rows[1:]])
    assert (seen["top_k_mass"]["rows"], seen["top_k_mass"]["positions"]) == (5, len(mass))
    assert seen["top_k_mass"]["mean"] == pytest.approx(mass.mean(), abs=1e-9)
    assert problem in inspect_text(seen)
    assert inspect_text(seen).splitlines()[0].endswith(": all is committed, but there are problems, see below")
    assert inspect(cache, sample_rows=0)["problems"] == []


def test_a_damaged_record_does_not_hide_the_rest(whole: tuple[Cache, list[Row]]) -> None:
    cache, rows = whole
    commit_path(cache, 0).write_text("{")
    seen = inspect(cache)
    assert (seen["rows_committed"], seen["shards_committed"], seen["complete"]) == (3, 1, False)
    assert seen["tokens"] == sum(map(len, rows[3:]))
    assert seen["missing_samples"] == "" and "000000.json is damaged" in seen["problems"][0]
    commit_path(cache, 1).write_text("{")
    with pytest.raises(CacheError, match=r"000000\.json is damaged"):
        inspect(cache)


def test_samples_are_spread_over_what_is_committed(whole: tuple[Cache, list[Row]], tmp_path: Path) -> None:
    cache, _ = whole
    assert spread_samples(cache, 3) == [0, 2, 5]
    assert spread_samples(cache, 100) == list(range(6))
    assert spread_samples(folder_of(cache), 1) == [0] and spread_samples(cache, 0) == []
    commit_path(cache, 0).unlink()
    assert spread_samples(cache, 2) == [3, 5]
    commit_path(cache, 1).unlink()
    assert spread_samples(cache, 2) == []
    short, _ = make_cache(tmp_path / "short", [4] * 7, 3)
    commit_path(short, 1).unlink()
    assert spread_samples(short, 4) == [0, 1, 2, 6]


@given(st.text())
def test_printable_text_has_no_control_and_says_the_same(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode("raw_unicode_escape", "surrogatepass").decode("unicode_escape") == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5 GiB"), (3 << 50, "3072 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
