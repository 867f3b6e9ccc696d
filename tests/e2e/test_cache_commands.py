"""``cache inspect``, ``cache verify`` and ``cache clean`` on a cache that a real capture made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_kd.cache.reader import CacheReader
from megatron_kd.data.tokenizer import load_tokenizer
from tests.assets import megatron_kd, succeed, tiny_llama_folder
from tests.e2e.road import captured_road, one_error_line
from tests.warm import warm


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A copy that tests may damage; no tokenizer lies beside it."""
    shutil.copytree(captured_road() / "cache", tmp_path / "cache")
    return tmp_path / "cache"


def flip(cache: Path, shard: int, name: str) -> Path:
    attempt = json.loads((cache / f"commits/{shard:06d}.json").read_text())["attempt"]
    file = cache / "shards" / attempt / name
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    return file


def test_inspect_says_what_the_cache_holds(cache: Path) -> None:
    text = succeed(warm("cache", "inspect", cache)).stdout
    assert text.startswith(f"{cache}: complete\n")
    for words in (
        "60 of 60, 2,880 tokens",
        "top 20 of 1,003 as float16",
        "tiny_llama",
        "bytes per token: ",
        "megatron",
    ):
        assert words in text
    assert "probability of the top 20: " in text and "█" in text


def test_inspect_spells_rows_out(cache: Path) -> None:
    road_cache = captured_road() / "cache"
    found = json.loads(succeed(warm("cache", "inspect", road_cache, "--rows", "3", "--json")).stdout)
    assert found["ids_not_spelled_out"] == "", "the tokenizer lies beside the cache, under its recorded name"
    tokenizer, reader = load_tokenizer(tiny_llama_folder()), CacheReader(road_cache)
    assert [row["sample_id"] for row in found["decoded_rows"]] == [0, 29, 59]
    for decoded in found["decoded_rows"]:
        row = reader.read(decoded["sample_id"])
        whole = tokenizer.decode(row.tokens)
        for at in decoded["positions"]:
            n = at["position"]
            assert at["context"] in whole
            assert [c["id"] for c in at["candidates"]] == row.ids[n, :5].tolist()
            assert [c["text"] for c in at["candidates"]] == [tokenizer.decode([i]) for i in row.ids[n, :5]]
            if at["next_token"] is not None:
                assert at["next_token"]["id"] == row.tokens[n + 1]
    moved = succeed(warm("cache", "inspect", cache, "--rows", "2")).stdout
    assert "ids are not spelled out: no tokenizer 'teacher/tokenizer' here, give it with --tokenizer" in moved
    given = succeed(warm("cache", "inspect", cache, "--rows", "2", "--tokenizer", tiny_llama_folder())).stdout
    assert "not spelled out" not in given and "sample 59: 48 tokens" in given and '→ "' in given
    one_error_line(warm("cache", "inspect", cache, "--tokenizer", tiny_llama_folder()), "--tokenizer", "--rows")
    one_error_line(warm("cache", "inspect", cache, "--rows", "1", "--tokenizer", cache / "no"), "no tokenizer at")


def test_inspect_shows_what_is_left_of_a_damaged_cache(cache: Path) -> None:
    file = flip(cache, 0, "rank/c.0.0")
    text = succeed(warm("cache", "inspect", cache, "--rows", "2")).stdout
    assert "60 of 60, 2,880 tokens" in text and "probability of the top 20" in text
    assert text.count(f"{file}: inner chunk 0") >= 2 and "sample 59: 48 tokens" in text


def test_verify_tells_holes_from_damage(cache: Path) -> None:
    """Started as a user starts it, on two processes: the same as on one."""
    (cache / "commits/000003.json").unlink()
    done = megatron_kd("cache", "verify", cache, "--level", "deep", "--workers", "2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{cache}: incomplete, samples 48–59 are missing at level deep (48 rows of 2,304 tokens" in done.stdout
    assert "damaged" not in done.stdout and "48/48 rows" in done.stderr
    file = flip(cache, 1, "logprob_delta/c.0.0")
    reports = []
    for workers in ("1", "2"):
        done = megatron_kd("cache", "verify", cache, "--workers", workers, "--json")
        assert done.returncode == 1
        reports.append(json.loads(done.stdout))
    assert reports[0] == reports[1]
    assert (reports[0]["damaged_shards"], reports[0]["missing_samples"]) == ([1], "48–59")
    text = warm("cache", "verify", cache).stdout
    assert f"{cache}: shard 1 is damaged; incomplete, samples 48–59 are missing at level crc" in text
    assert str(file) in text
    assert warm("cache", "verify", cache, "--workers", "0").returncode == 2
    one_error_line(warm("cache", "verify", cache, "--level", "all"), "--level is 'all'")


def test_clean_removes_what_crashed_captures_left(cache: Path) -> None:
    left = cache / "shards" / "000001-crashed"
    left.mkdir()
    (left / "rank").write_bytes(bytes(2048))
    seen = json.loads(succeed(warm("cache", "clean", cache, "--json")).stdout)
    assert (seen["removed"], [kept["name"] for kept in seen["kept"]]) == ([], ["shards/000001-crashed"])
    text = succeed(warm("cache", "clean", cache, "--idle-hours", "0", "--dry-run")).stdout
    assert "would remove shards/000001-crashed: 2 KiB" in text and left.exists()
    verified = warm("cache", "verify", cache)
    assert verified.returncode == 0 and "1 leftover, see `megatron-kd cache clean`" in verified.stdout
    text = succeed(warm("cache", "clean", cache, "--idle-hours", "0")).stdout
    assert "removed 1 leftover of 2 KiB" in text and not left.exists()
    assert succeed(warm("cache", "verify", cache, "--level", "deep"))
    assert warm("cache", "clean", cache, "--idle-hours", "-1").returncode == 2
    one_error_line(warm("cache", "clean", cache / "shards"), "is not a cache")
