"""A sweep as an array: each task its own point; a task that SLURM asks to stop goes on alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster, Job, wait_until
from tests.slurm.runs import STEPS, said, state_of, steps_done

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def sweep(cluster: Cluster, recipe: Path) -> Path:
    """Two seeds of the tiny recipe, on one node each."""
    path = cluster.folder / "seeds.yaml"
    file = {"base": str(recipe), "run_dir": str(cluster.folder / "seeds"), "grid": {"seed": list(SEEDS)}}
    path.write_text(yaml.safe_dump(file))
    return path


def test_each_task_trains_its_point_and_goes_on_alone(cluster: Cluster, sweep: Path) -> None:
    options = ("--nodes=1", "--array=1-2")
    array = cluster.submit("sweep.sh", sweep, "cluster.nodes=1", options=options)
    tasks = [Job(cluster, f"{array.number}_{index}") for index in SEEDS]
    runs = [cluster.folder / f"seeds/seed_{seed}" for seed in SEEDS]
    wait_until(lambda: all(steps_done(run) >= 2 for run in runs), "two steps of each point")
    # The task whose number is that of the whole array: what it says to SLURM must not reach the other.
    (last,) = (task for task in tasks if task.facts["JobId"] == array.number)
    last.signal("USR1", "--batch")
    for task, run in zip(tasks, runs, strict=True):
        assert task.ended() == ("COMPLETED", 0), said(task)
        assert state_of(run / "status.json") == {"state": "finished", "iteration": STEPS, "train_iters": STEPS}
    assert [task.facts["Restarts"] for task in tasks] == ["1" if task is last else "0" for task in tasks]


def test_a_sweep_without_an_array_or_with_a_mistake(cluster: Cluster, sweep: Path) -> None:
    alone = cluster.submit("sweep.sh", sweep, "cluster.nodes=1", options=("--nodes=1",))
    alone.one_error("has 2 points: sbatch --array=1-2 launch/sweep.sh train")
    wrong = cluster.submit("sweep.sh", sweep, "cluster.nodes=1", "loss.tial=bucket", options=("--nodes=1",))
    wrong.one_error("did you mean loss.tail?")
