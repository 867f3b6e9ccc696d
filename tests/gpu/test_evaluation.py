"""An evaluation on a GPU says what it says on the CPU, and the harness runs there."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import pytest

from tests.assets import ROOT, megatron_kd, succeed, tiny_recipe


def test_details_and_tasks(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path, cluster={"gpu": "h200"}, training={"train_iters": 1, "precision": "fp32"}, checkpoint={}
    )
    succeed(megatron_kd("convert", "import", recipe))
    for command in ("prepare", "capture", "train"):
        succeed(megatron_kd(command, recipe, "optimizer.lr_warmup_iters=0"))
    run = tmp_path / "run"
    here, there = (
        json.loads(succeed(megatron_kd("evaluate", run, *where, "--json")).stdout)
        for where in ((), ("cluster.gpu=cpu",))
    )
    assert here.keys() == there.keys()
    means = {name: value for name, value in there.items() if name.startswith("eval/")}
    assert {name: here[name] for name in means} == pytest.approx(means, rel=2e-2, abs=1e-3)
    assert [row["tokens"] for row in here["by_position"]] == [row["tokens"] for row in there["by_position"]]
    if util.find_spec("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is not installed: extra tasks")
    tasks = ("--tasks", "kd_choice,kd_generate", "--include-path", ROOT / "tests/tasks", "--json")
    scores = json.loads(succeed(megatron_kd("evaluate", run, *tasks)).stdout)["scores"]
    assert {row["task"] for row in scores} == {"kd_choice", "kd_generate"}
