"""launch/local.sh: a recipe on this machine, on its ranks, stopped as users and SLURM stop it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.assets import ROOT, environment, steps_of, tiny_recipe
from tests.e2e.road import captured_road

LOCAL = ROOT / "launch/local.sh"


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The script in a session of its own, as a terminal starts it."""
    return subprocess.Popen(
        ["bash", LOCAL, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def refused(*arguments: str) -> str:
    """Its one line of error."""
    process = start(*arguments)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (2, ""), said
    [line] = said.splitlines()
    return line


def test_two_ranks_stop_together_and_go_on(tmp_path: Path) -> None:
    recipe, run = captured_road() / "recipe.yaml", tmp_path / "run"
    words = [str(recipe), f"run_dir={run}", "cluster.gpus_per_node=2", "training.train_iters=100000"]
    process = start("train", *words)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "launch: stopping: the ranks save and leave" in said and "Traceback" not in said, said
    done = steps_of(run)[-1]["iteration"]
    assert f"iteration {done}, stopped" in printed
    assert json.loads((run / "status.json").read_text()) == {
        "state": "stopped",
        "iteration": done,
        "train_iters": 100000,
    }
    again = start(*words[:3], f"training.train_iters={done + 1}", "optimizer.lr_decay_iters=100000")
    printed, said = again.communicate(timeout=120)
    assert again.returncode == 0 and f"iteration {done + 1}, finished" in printed, said


def test_a_command_that_keeps_nothing_ends(tmp_path: Path) -> None:
    recipe = captured_road() / "recipe.yaml"
    process = start("prepare", str(recipe), f"data.samples={tmp_path}/samples")
    time.sleep(1.5)  # Python imports for longer
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM), said
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no recipe"),
        (["none.yaml"], "no recipe none.yaml"),
        (["RECIPE", "cluster.nodes=2", "training.global_batch_size=8"], "sbatch launch/job.sh starts it"),
        (["RECIPE", "training.train_iter=2"], "did you mean training.train_iters?"),
        (["convert", "export", "RECIPE"], "can only convert import"),
        (["RECIPE", "two"], "'two': write key=value"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], words: str) -> None:
    recipe = str(tiny_recipe(tmp_path))
    assert words in refused(*(recipe if word == "RECIPE" else word for word in arguments))
