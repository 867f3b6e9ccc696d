"""Capture, training and evaluation as dependent jobs; what was stopped does not count as done."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.assets import ROOT
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.slurm.runs import said, state_of


@pytest.fixture(scope="module")
def stages(cluster: Cluster, recipe: Path) -> tuple[Path, list[Job]]:
    """prepare, two captures, train and evaluate on one node each; the first capture is stopped while it works."""
    home = cluster.folder / "pipeline"
    overrides = [
        "cluster.nodes=1",
        "name=piped",
        f"data.samples={home / 'samples'}",
        "data.train_tokens=24000",
        f"teacher.cache={home / 'cache'}",
        f"run_dir={home / 'run'}",
        "training.train_iters=4",
    ]
    env = {"KD_STAGES": "prepare capture train evaluate", "KD_CAPTURE_JOBS": "2", "KD_LOGS": str(home / "logs")}
    printed = cluster.run(ROOT / "launch/pipeline.sh", "--exclusive", recipe, *overrides, env=env)
    numbers = re.findall(r"^launch: job (\d+): (\w+)", printed, re.MULTILINE)
    assert [stage for _, stage in numbers] == ["prepare", "capture", "train", "evaluate"]
    prepare, capture, train, evaluate = (number for number, _ in numbers)
    jobs = [Job(cluster, number) for number in (prepare, f"{capture}_1", f"{capture}_2", train, evaluate)]
    return home, jobs


def test_each_waits_for_the_work_before_it(cluster: Cluster, stages: tuple[Path, list[Job]]) -> None:
    home, (prepare, first, second, train, evaluate) = stages
    shards = home / "cache"

    def at_work() -> bool:
        assert first.facts["JobState"] in ("PENDING", "RUNNING"), said(first)
        return len(list(shards.rglob("*"))) > 20

    wait_until(at_work, "the capture")
    first.signal("USR1", "--batch")
    for job in (prepare, first, second, train, evaluate):
        assert job.ended() == ("COMPLETED", 0), said(job)
    facts = [job.facts for job in (prepare, first, second, train, evaluate)]
    assert facts[1]["Restarts"] == "1" and "goes on after requeue 1" in first.log, said(first)
    begun, ended = [fact["StartTime"] for fact in facts], [fact["EndTime"] for fact in facts]
    assert ended[0] <= min(begun[1:3]) and max(ended[1:3]) <= begun[3] and ended[3] <= begun[4]


def test_what_came_of_it(cluster: Cluster, stages: tuple[Path, list[Job]]) -> None:
    home, jobs = stages
    assert jobs[-1].ended() == ("COMPLETED", 0)
    assert state_of(home / "run/status.json") == {"state": "finished", "iteration": 4, "train_iters": 4}
    evaluation = json.loads((home / "run/evaluations/iter_0000004.json").read_text())
    [log] = (home / "logs").glob(f"piped-evaluate-{jobs[-1].number}/node_0.log")
    assert f"{evaluation['eval/kd']:.6g}" in log.read_text()
    assert jobs[-1].output.parent == home / "logs"


def test_a_stage_that_fails_cancels_the_next(cluster: Cluster, recipe: Path) -> None:
    env = {"KD_STAGES": "train evaluate"}
    printed = cluster.run(ROOT / "launch/pipeline.sh", recipe, "teacher.cache=none", "run_dir=never", env=env)
    train, evaluate = (Job(cluster, number) for number in re.findall(r"job (\d+):", printed))
    train.one_error("teacher.cache none is not there")
    assert evaluate.ended()[0] == "CANCELLED"
