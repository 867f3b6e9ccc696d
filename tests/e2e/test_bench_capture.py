"""``megatron-kd bench capture`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.assets import succeed, tiny_recipe
from tests.e2e.road import captured_road, files_below, one_error_line
from tests.warm import start, warm

FIGURES = {"forward", "head", "top_k", "rows", "write", "bare", "capture"}


def test_the_recipes_samples_in_json(tmp_path: Path) -> None:
    road = captured_road()
    before = files_below(road)
    done = succeed(
        warm("bench", "capture", road / "recipe.yaml", "--rows", "3", "--json", env={"TMPDIR": str(tmp_path)})
    )
    found = json.loads(done.stdout)
    (row,) = found["results"]
    assert (row["source"], row["rows"], row["row_tokens"], row["rounds"]) == (str(road / "samples"), 3, 48, 3)
    assert (row["engine"], row["ranks"], row["threads"], row["clock"]) == ("megatron", 1, 1, "process_cpu")
    assert set(row["us_per_token"]) == FIGURES and all(value > 0 for value in row["us_per_token"].values())
    for name, (lowest, highest) in row["us_per_token_spread"].items():
        assert lowest <= row["us_per_token"][name] <= highest
    assert row["overhead_spread"][0] <= row["overhead"] <= row["overhead_spread"][1]
    assert 0 < row["writer_share"] < 1
    assert found["notes"] and all(f"note: {note}" in done.stderr.splitlines() for note in found["notes"])
    assert files_below(road) == before and files_below(tmp_path) == []


def test_rows_of_another_length_with_transformers() -> None:
    """Prepared in a temporary folder; the recipe's samples are left alone."""
    road = captured_road()
    before = files_below(road)
    options = ["teacher.engine=hf", "--row-length", "64", "--rows", "2", "--threads", "2"]
    done = succeed(warm("bench", "capture", road / "recipe.yaml", *options))
    assert "no rows of 64 tokens yet: preparing 2 in a temporary folder" in done.stderr
    assert "rows: prepared from pydoc_topics\n" in done.stdout
    assert "engine hf, fp32, top 20" in done.stdout and "cpu, 2 threads" in done.stdout
    assert "2 rows of 64 tokens" in done.stdout and "overhead over the bare forward: " in done.stdout
    assert files_below(road) == before


def test_a_recipe_of_which_nothing_is_there_yet(tmp_path: Path) -> None:
    """Not even its checkpoint, in online mode; nothing of it appears."""
    recipe = tiny_recipe(tmp_path / "made", teacher={"mode": "online", "targets": "top_k", "cache": None})
    done = succeed(warm("bench", "capture", recipe, "--rows", "1"))
    assert "1 row of 48 tokens" in done.stdout
    assert files_below(tmp_path) == ["made/recipe.yaml"]


def test_two_tensor_parallel_ranks_with_sequence_parallelism() -> None:
    road = captured_road()
    overrides = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"]
    overrides += ["parallelism.sequence_parallel=true"]
    first, second = start("bench", "capture", road / "recipe.yaml", *overrides, "--rows", "2", "--json", ranks=2).wait()
    succeed(first)
    succeed(second)
    (row,) = json.loads(first.stdout)["results"]
    assert (row["ranks"], row["tensor_parallel"], row["data_parallel"]) == (2, 2, 1)
    assert row["us_per_token"]["write"] > 0
    assert second.stdout == "" and "note: " not in second.stderr
    assert "the figures are those of the first rank" in first.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "0"], ["rows is 0, must be positive"]),
        (["no/such/recipe.yaml"], ["no/such/recipe.yaml"]),
    ],
)
def test_bad_options(options: list[str], words: list[str]) -> None:
    one_error_line(warm("bench", "capture", *options), *words)


def test_several_ranks_need_prepared_samples() -> None:
    overrides = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"]
    recipe = captured_road() / "recipe.yaml"
    for done in start("bench", "capture", recipe, *overrides, "--row-length", "64", ranks=2).wait():
        one_error_line(done, "no rows of 64 tokens", "2 ranks", "megatron-kd prepare")


def test_help() -> None:
    """Within a terminal of 80 columns, without a sentence cut short."""
    done = succeed(warm("bench", "capture", "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")], done.stdout
