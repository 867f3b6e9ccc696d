"""What is wrong with a job, said in one line of its log before any rank is started."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Job

WARNING = "warning: logging.wandb.mode is online and there is no login"


@dataclass(frozen=True)
class Case:
    """Arguments behind the recipe, sbatch's options, the environment, and what the one line must say."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    options: tuple[str, ...] = ("--nodes=1",)
    env: tuple[tuple[str, str], ...] = ()
    command: str = "train"


H200 = ("cluster.gpu=h200", "cluster.gpus_per_node=8", "training.global_batch_size=16")
CASES = {
    "nodes": Case(
        ("logging.wandb={project: p, mode: online}",),
        ("cluster.nodes 2, the job has 1", "sbatch --nodes=2", "cluster.nodes=1"),
    ),
    "no GPUs": Case(H200, ("no GPU here", "8 × h200", "sbatch --gpus-per-node=8")),
    "too few GPUs": Case(
        H200,
        ("4 GPUs here, the recipe wants 8", "sbatch --gpus-per-node=8", "cluster.gpus_per_node=4"),
        ("--nodes=1", "--gpus-per-node=4"),
    ),
    "a key": Case(("training.train_iter=3",), ("training.train_iter", "did you mean training.train_iters?")),
    "the batch": Case(("training.global_batch_size=3",), ("training.global_batch_size 3", "use 4")),
    "no image": Case((), ("no container image /none.sqsh", "enroot import"), env=(("KD_CONTAINER", "/none.sqsh"),)),
    "no pyxis": Case((), ("srun knows no --container-image", "KD_VENV"), env=(("KD_CONTAINER", "some#image:1"),)),
    "no environment": Case((), ("KD_VENV /none is no virtual environment", "make setup"), env=(("KD_VENV", "/none"),)),
    "one node without the cache": Case(
        ("teacher.cache=on/${SLURMD_NODENAME}/cache",),
        ("n2: teacher.cache on/n2/cache is not there", "every node"),
        ("--nodes=2",),
    ),
    "no samples": Case(("data.samples=none",), ("data.samples none is not there",), command="capture"),
    "no checkpoint": Case(("teacher.checkpoint=none",), ("teacher.checkpoint none is not there",), command="capture"),
    "no run": Case(("run_dir=none",), ("run_dir none is not there: train first",), command="evaluate"),
    "a run directory that cannot be": Case(("run_dir=/proc/none",), ("run_dir /proc/none cannot be made",)),
    "no folder for logs": Case((), ("cannot make /proc/logs",), env=(("KD_LOGS", "/proc/logs"),)),
    "an array": Case((), ("--array is for capture",), ("--nodes=1", "--array=1-1")),
    "an array that leaves parts out": Case(
        (), ("array 2-3 of 2 parts", "KD_PARTS"), ("--nodes=1", "--array=2-3"), command="capture"
    ),
    "an argument": Case(("30",), ("'30': write key=value",)),
}


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, recipe: Path) -> dict[str, Job]:
    """All cases are submitted at once: most of a short job's time is SLURM's."""
    (cluster.folder / "on" / "n1" / "cache").mkdir(parents=True)
    submitted = {}
    for name, case in CASES.items():
        env = {"NETRC": "/none", "KD_LOGS": "logs", **dict(case.env)}
        submitted[name] = cluster.submit("job.sh", case.command, recipe, *case.arguments, options=case.options, env=env)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        submitted["port"] = cluster.submit(
            "job.sh",
            recipe,
            "cluster.nodes=1",
            f"run_dir=port_{port}",
            options=("--nodes=1",),
            env={"KD_MASTER_PORT": port},
        )
        submitted["port"].ended(patience_s=200)
    return submitted


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_it(jobs: dict[str, Job], name: str) -> None:
    jobs[name].one_error(*CASES[name].words)
    assert (WARNING in jobs[name].log) == (name == "nodes")


def test_a_port_in_use(jobs: dict[str, Job]) -> None:
    jobs["port"].one_error("of 127.0.0.1 is in use", "choose another KD_MASTER_PORT")


def test_no_recipe(cluster: Cluster, recipe: Path) -> None:
    missing = cluster.submit("llama31_8b_to_3b_8k.sh", "capture", "none.yaml", options=("--nodes=1",))
    missing.one_error(": no recipe none.yaml in ")
    cluster.submit("job.sh", options=("--nodes=1",)).one_error("no recipe: sbatch launch/job.sh train RECIPE")


def test_slurm_itself_refuses_what_never_fits(cluster: Cluster, recipe: Path) -> None:
    with pytest.raises(AssertionError, match="Node count specification invalid"):
        cluster.submit("job.sh", recipe, options=("--nodes=4",))
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        cluster.submit("job.sh", recipe, options=("--nodes=2", "--gpus-per-node=9"))
