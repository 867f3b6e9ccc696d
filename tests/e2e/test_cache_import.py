"""``cache import``: from the files of another system to a student that trains on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_kd.data.samples import open_samples
from tests.assets import steps_of, succeed
from tests.e2e.road import captured_road, files_below, one_error_line
from tests.unit.cache_import_sources import teacher_logits, write_first_layout
from tests.warm import warm

pytest.importorskip("zstandard", reason="Megatron-LM's saver needs zstandard: pip install -e '.[dev]'")


def test_tars_of_megatron_lm_become_a_cache_that_trains(tmp_path: Path) -> None:
    road = captured_road()
    samples = open_samples(road / "samples")
    write_first_layout(tmp_path / "tars", samples, cp=2, dp=2, k=5, vocab=1003)
    command: list[str | Path] = ["cache", "import", "megatron-lm", tmp_path / "tars", "--samples", road / "samples"]
    command += ["--cache", tmp_path / "cache", "--vocab-size", "1003", "--rows-per-shard", "7"]
    one_error_line(warm(*command), "carry no tokens", "--trust-order")
    assert files_below(tmp_path / "cache") == []

    done = succeed(warm(*command, "--trust-order", "--teacher", "tiny", "--json"))
    report = json.loads(done.stdout)
    assert (report["rows"], report["rows_imported"], report["matched_by"]) == (60, 60, "order")
    assert report["evidence"]["own_next_token_only"] > 20 * report["evidence"]["other_next_token_only"]
    assert "import → " in done.stderr and "60/60 rows" in done.stderr
    again = succeed(warm(*command, "--trust-order", "--teacher", "tiny"))
    assert "60 rows of megatron-lm, 0 imported now, matched by their order, which was trusted" in again.stdout
    one_error_line(warm(*command, "--trust-order", "--teacher", "another"), "teacher.name there: 'tiny'", "'another'")
    succeed(warm("cache", "verify", tmp_path / "cache", "--level", "deep"))

    overrides = [f"teacher.cache={tmp_path / 'cache'}", "teacher.top_k=5", "training.train_iters=3"]
    succeed(warm("train", road / "recipe.yaml", f"run_dir={tmp_path / 'run'}", *overrides))
    masses = [teacher_logits(samples, i, 1003).softmax(-1).topk(5)[0].sum(-1).mean().item() for i in range(60)]
    steps = steps_of(tmp_path / "run")
    assert [step["kd/teacher_mass"] for step in steps] == pytest.approx([sum(masses) / 60] * 3, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["parquet", "."], ["format 'parquet' cannot be imported", "megatron-lm, distillkit"]),
        (["megatron-lm", "nowhere"], ["nowhere is not a folder"]),
        (["megatron-lm", "docs"], ["docs holds no tars"]),
        (["megatron-lm", "docs", "--rows-per-shard", "0"], ["--rows-per-shard is 0"]),
        (["megatron-lm", "docs", "--vocab-size", "201088"], ["vocabulary of 201088", "17 bits"]),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    samples = captured_road() / "samples"
    done = warm("cache", "import", *arguments, "--samples", samples, "--cache", tmp_path / "cache")
    one_error_line(done, *words)
    assert files_below(tmp_path) == []
