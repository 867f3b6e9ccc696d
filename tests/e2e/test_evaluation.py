"""``evaluate``: the details of a run, printed and kept, and its scores on tasks beside the teacher's."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import pytest

from megatron_kd.report.runs import read_run
from tests.assets import ROOT, succeed
from tests.e2e.road import captured_road, one_error_line
from tests.warm import warm

MEANS = (
    "top5_agreement",
    "teacher_top1_in_top5",
    "teacher_entropy",
    "accuracy",
    "ece",
    "teacher_accuracy",
    "teacher_ece",
)
TABLES = ("by_position", "by_entropy", "reliability", "teacher_reliability")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, with details before the first and after the last."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    recipe = captured_road() / "recipe.yaml"
    short = ("training.train_iters=2", "optimizer.lr_warmup_iters=0")
    succeed(warm("train", recipe, f"run_dir={folder}", *short, "training.eval_details=true"))
    return folder


def test_training_logs_the_means_and_keeps_the_tables(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/kd" in line]
    assert [line["iteration"] for line in evaluations] == [0, 2]
    for line in evaluations:
        assert {f"eval/{name}" for name in MEANS} <= line.keys() and not set(TABLES) & line.keys()
        kept = json.loads((run / f"evaluations/iter_{line['iteration']:07d}.json").read_text())
        assert set(TABLES) <= kept.keys() and kept["eval/ece"] == line["eval/ece"]


def test_evaluate_prints_what_it_keeps(run: Path) -> None:
    file = run / "evaluations/iter_0000002.json"
    before = json.loads(file.read_text())
    file.unlink()
    printed = succeed(warm("evaluate", run)).stdout
    kept = json.loads(file.read_text())
    assert kept.keys() == before.keys() and kept["eval/kd"] == pytest.approx(before["eval/kd"], rel=1e-6)
    for name, value in kept.items():
        if name.startswith("eval/"):
            assert f"{name:26} {value:.6g}\n" in printed
    [entropy] = [line for line in printed.splitlines() if line.startswith("teacher's entropy")]
    assert entropy.split()[-5:] == ["tokens", "KD", "CE", "top-1", "top-5"]
    assert "\n32–47 " in printed and "student's confidence" in printed


@pytest.mark.skipif(util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed: extra tasks")
def test_tasks_beside_the_teacher(run: Path, tmp_path: Path) -> None:
    options = (
        "--tasks",
        "kd_choice,kd_generate",
        "--include-path",
        ROOT / "tests/tasks",
        "--keep-student",
        tmp_path / "hf",
    )
    quiet = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    printed = json.loads(succeed(warm("evaluate", run, *options, "--json", env=quiet)).stdout)
    assert json.loads((run / "evaluations/tasks_iter_0000002.json").read_text()) == printed
    assert printed["iteration"] == 2 and printed["teacher"] == "tiny_llama" and printed["tokens"] > 0
    found = {(row["task"], row["metric"]): row for row in printed["scores"]}
    assert set(found) == {("kd_choice", "acc"), ("kd_choice", "acc_norm"), ("kd_generate", "exact_match")}
    for row in found.values():
        assert row["items"] == (8 if row["task"] == "kd_choice" else 3)
        assert row["difference"] == pytest.approx(row["student"] - row["teacher"])
    assert (tmp_path / "hf/model.safetensors").exists()
    assert [path.name for path in run.iterdir() if path.name.startswith((".student", ".teacher"))] == []
    # A comparison reads the evaluations beside it, and not the scores as one of them.
    assert [row["iteration"] for row in read_run(run).evaluations if "scores" not in row] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--limit", "3"), ("--limit goes with --tasks",)),
        (("--tasks", ","), ("--tasks names no task",)),
        (("--tasks", "boolq", "--keep-student", "."), ("exists already", "--keep-student")),
    ],
)
def test_what_cannot_be_asked(run: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_error_line(warm("evaluate", run, *arguments), *words)


def test_a_recipe_has_no_scores_yet() -> None:
    one_error_line(
        warm("evaluate", captured_road() / "recipe.yaml", "--tasks", "boolq"), "is a recipe", "run directory"
    )
