"""Training by the scripts of launch/ on two nodes of a real SLURM: stopped, killed, cancelled, queued again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.assets import succeed
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.runs import SAVE, STEPS, curve, said, saved, state_of, steps_done, trained
from tests.warm import warm

FINISHED = {"state": "finished", "iteration": STEPS, "train_iters": STEPS}


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, recipe: Path) -> Path:
    """The run that all others are compared with."""
    run = cluster.folder / "undisturbed"
    job = cluster.submit("gptoss20b_32k.sh", "train", recipe, f"run_dir={run}")
    assert job.ended() == ("COMPLETED", 0), said(job)
    assert job.facts["JobName"] == "gptoss20b_32k" and job.facts["NumNodes"] == "2"
    assert "train is finished" in job.log
    return run


def test_two_nodes_train_with_an_override(cluster: Cluster, undisturbed: Path) -> None:
    assert [step for step, _, _ in curve(undisturbed)] == list(range(1, STEPS + 1))
    assert state_of(undisturbed / "status.json") == FINISHED
    assert {path.name for path in (undisturbed / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    [first, second] = sorted(cluster.folder.glob("logs/gptoss20b_32k-*/node_*.log"))
    assert f"{undisturbed}: iteration {STEPS}, finished" in first.read_text() and second.read_text() == ""


def test_doctor_looks_at_every_node(cluster: Cluster, recipe: Path) -> None:
    job = cluster.submit("job.sh", "doctor", recipe, f"run_dir={cluster.folder / 'examined'}", "--json", "--quick")
    assert job.ended() == ("COMPLETED", 0), said(job)
    [first, _] = sorted(cluster.folder.glob(f"logs/*-{job.number}/node_*.log"))
    found = json.loads(first.read_text())
    assert found["ok"] and found["ranks"] == 2 and found["nodes"] == ["n1", "n2"], found


def test_a_signal_saves_requeues_and_goes_on_exactly(cluster: Cluster, recipe: Path, undisturbed: Path) -> None:
    run = cluster.folder / "requeued"
    job = cluster.submit("job.sh", recipe, f"run_dir={run}")
    trained(job, run, 3)
    job.signal("USR1", "--batch")  # as SLURM does before a time limit
    assert job.ended() == ("COMPLETED", 0), said(job)
    assert job.facts["Restarts"] == "1" and "requeue 1 of at most 20" in job.log, job.log
    assert any(step % SAVE for step in saved(run)), "it was not stopped between two saves"
    assert state_of(run / "status.json") == FINISHED
    assert curve(run) == curve(undisturbed)


def test_requeues_have_a_cap(cluster: Cluster, recipe: Path) -> None:
    run = cluster.folder / "capped"
    job = cluster.submit("job.sh", recipe, f"run_dir={run}", env={"KD_MAX_REQUEUES": "0"})
    trained(job, run, 1)
    job.signal("USR1", "--batch")
    assert job.ended() == ("FAILED", 75), said(job)
    assert "submit it again to go on, or raise KD_MAX_REQUEUES (0)" in job.log
    assert state_of(run / "status.json")["state"] == "stopped"


def test_a_rank_that_dies_ends_the_job_at_once(cluster: Cluster, recipe: Path) -> None:
    run = cluster.folder / "died"
    job = cluster.submit("job.sh", recipe, f"run_dir={run}", "training.train_iters=100000")
    trained(job, run, 2)
    [pid] = cluster.ranks("n2")
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    state, status = job.ended(30)
    assert (state, status) == ("FAILED", 137), said(job)
    assert time.monotonic() - began < 20
    assert "train failed with status 137" in job.log and "task 1: Killed" in job.log, job.log


def test_a_node_that_dies_is_replaced(cluster: Cluster, recipe: Path, undisturbed: Path) -> None:
    run = cluster.folder / "lost"
    job = cluster.submit("job.sh", recipe, f"run_dir={run}")
    trained(job, run, SAVE + 2)
    cluster.control("lose", "n2")
    wait_until(lambda: job.facts["Restarts"] == "1", "the requeue")
    # Another node takes its place: the lost one, back at once, might be told late to end the job, of either start.
    cluster.control("restore", "n3")
    assert job.ended() == ("COMPLETED", 0), said(job)
    assert job.facts["NodeList"] == "n[1,3]" and curve(run) == curve(undisturbed)
    cluster.control("lose", "n3")
    cluster.run("scontrol", "update", "nodename=n3", "state=down", "reason=spare")
    cluster.control("restore", "n2")


def test_cancelled_it_leaves_a_good_checkpoint(cluster: Cluster, recipe: Path) -> None:
    run = cluster.folder / "cancelled"
    job = cluster.submit("job.sh", recipe, f"run_dir={run}", "training.train_iters=100000")
    trained(job, run, SAVE + 1)
    cluster.run("scancel", job.number)
    assert job.ended()[0] == "CANCELLED"
    wait_until(lambda: cluster.ranks("n") == [], "the end of its ranks")
    assert saved(run) and not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert saved(run)[-1] == steps_done(run), "what was learnt was saved within KillWait"
    exported = warm("convert", "export", run, "--output", cluster.folder / "exported", "--json")
    assert f"iter_{saved(run)[-1]:07d}" in succeed(exported).stdout


def test_doctor_meets_its_ranks_under_srun(cluster: Cluster, recipe: Path) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")
    program = (sys.executable, "-m", "megatron_kd", "doctor", recipe, "--quick", "--json")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])  # the one of job 1 may be another cluster's of this machine
    report = json.loads(cluster.run(*srun, *program, env={"MASTER_PORT": port}))
    found = {(check["name"], check["status"]) for check in report["checks"]}
    assert report["ok"] and report["ranks"] == 2 and report["nodes"] == ["n1", "n2"]
    assert {("ranks", "ok"), ("links", "ok"), ("shared-paths", "ok")} <= found
