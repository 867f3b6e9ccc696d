"""``megatron-kd bench cache`` as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.assets import ROOT, command_line, environment, succeed
from tests.e2e.road import captured_road, files_below, one_error_line
from tests.warm import warm

FAST = ["--rounds", "1", "--rate-tokens", "200"]


def started(tmp_path: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """A process of its own: one that is forked has chosen its folder for temporary files already."""
    return subprocess.Popen(
        command_line("bench", "cache", *arguments),
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_recipes_cache_in_json(tmp_path: Path) -> None:
    road = captured_road()
    before = files_below(road)
    process = started(tmp_path, road / "recipe.yaml", *FAST, "--json")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads(output)
    assert [row["format"] for row in found["results"]] == ["ours", "ours", "ours_plain_ids", "megatron_lm", "parquet"]
    assert found["targets"]["source"] == str(road / "cache") and found["targets"]["row_tokens"] == [48, 48]
    assert found["rank_table"]["in_sample"] is False
    assert found["notes"] and all(f"note: {note}" in errors.splitlines() for note in found["notes"])
    assert "Traceback" not in errors and "Warning" not in errors
    assert files_below(tmp_path) == [] and files_below(road) == before


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, "--cache", captured_road() / "cache", "--rounds", "100000", "--rate-tokens", "200")
    try:
        deadline = time.monotonic() + 60
        while not any("often" in name for name in files_below(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None and files_below(tmp_path), "it never began"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL) and "Traceback" not in errors
    assert files_below(tmp_path) == []


def test_a_capture_of_its_own() -> None:
    """With longer rows than the recipe's, of its teacher's checkpoint; its samples and its cache are not touched."""
    road = captured_road()
    before = files_below(road)
    options = ["--row-length", "64", "--tokens", "128", "--top-k", "7", *FAST]
    done = succeed(warm("bench", "cache", road / "recipe.yaml", *options))
    assert done.stdout.startswith("128 tokens (2 rows of 64), top 7, vocabulary")
    assert "capturing 34 rows of 64 tokens from" in done.stderr
    assert files_below(road) == before


def test_a_teacher_that_was_never_imported(tmp_path: Path) -> None:
    recipe, missing = captured_road() / "recipe.yaml", tmp_path / "not_there"
    options = ["--row-length", "64", "--tokens", "64", *FAST]
    succeed(warm("bench", "cache", recipe, f"teacher.checkpoint={missing}", *options))
    assert not missing.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cache", "no/such/cache"], ["no/such/cache is not a cache"]),
        (["--cache", "x", "--row-length", "64"], ["--cache x already has its rows"]),
        (["--rounds", "0"], ["rounds is 0, must be positive"]),
        (["no/such/recipe.yaml"], ["no/such/recipe.yaml"]),
    ],
)
def test_bad_options(options: list[str], words: list[str]) -> None:
    one_error_line(warm("bench", "cache", *options), *words)


def test_a_recipe_of_several_ranks_is_not_captured() -> None:
    recipe = captured_road() / "recipe.yaml"
    overrides = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"]
    one_error_line(warm("bench", "cache", recipe, *overrides, "--row-length", "64"), "2 ranks", "with --cache")


def test_help() -> None:
    """Within a terminal of 80 columns, without a sentence cut short."""
    done = succeed(warm("bench", "cache", "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")], done.stdout
