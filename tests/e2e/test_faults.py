"""Faults of a long run, with real processes: all ranks end, one line says why, and the run goes on bit-equal.

Damaged checkpoints, bad rows, lost wandb servers and faults inside a background save are tested elsewhere; the table of
all is in docs/measurements.md.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.assets import command_line, environment, steps_of, succeed
from tests.e2e.road import captured_road
from tests.training_runs import losses_of
from tests.warm import Started, start

STEPS, SAVE = 12, 2
PAIR = ["cluster.gpus_per_node=2", f"training.train_iters={STEPS}", f"checkpoint.save_interval={SAVE}"]
PATIENCE_S = 120.0


def report(what: str, seconds: float) -> None:
    """A line of the table in docs/measurements.md; pytest shows it with -s."""
    print(f"\n{what}: all processes ended after {seconds:.1f} s")


def train(recipe: Path, run: Path, *overrides: str) -> Started:
    return start("train", recipe, f"run_dir={run}", *PAIR, *overrides, ranks=2)


def saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run / "checkpoints").glob("iter_*"))


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".iter_*.partial"))


def lines(run: Path) -> int:
    """Steps in the metrics so far."""
    file = run / "metrics.jsonl"
    return file.read_text().count('"loss/kd"') if file.exists() else 0


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.0005)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    """Whether there is such a process, and not only its entry for a parent that does not look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def goes_on(recipe: Path, run: Path, straight: list[Any], *overrides: str) -> None:
    """Resumes from the newest checkpoint and ends with the losses of a run that nothing happened to."""
    newest = saved(run)[-1]
    for rank in train(recipe, run, *overrides).wait():
        succeed(rank)
    resumed = [line for line in (run / "logs/rank_1.log").read_text().splitlines() if "resumed from" in line]
    assert resumed[-1].endswith(f"iter_{newest:07d}")
    assert losses_of(steps_of(run)) == straight
    assert saved(run)[-1] == STEPS and not list((run / "checkpoints").glob(".*")), "what was half done is cleared away"


def one_says(ranks: list[subprocess.CompletedProcess[str]], *words: str) -> None:
    """One rank's last line has all the words, the others that another rank failed; no traceback anywhere."""
    assert [rank.returncode for rank in ranks] == [2] * len(ranks), [rank.stderr for rank in ranks]
    last = [rank.stderr.splitlines()[-1] for rank in ranks]
    assert not any("Traceback" in rank.stderr for rank in ranks), [rank.stderr for rank in ranks]
    assert sum(all(word in line for word in words) for line in last) == 1, last
    assert sum("on another rank; its message says why" in line for line in last) == len(ranks) - 1, last


@pytest.fixture(scope="module")
def recipe() -> Path:
    return captured_road() / "recipe.yaml"


@pytest.fixture(scope="module")
def reference(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    run = tmp_path_factory.mktemp("reference") / "run"
    for rank in train(recipe, run).wait():
        succeed(rank)
    return run


@pytest.fixture(scope="module")
def straight(reference: Path) -> list[Any]:
    """Its losses and gradient norms."""
    losses = losses_of(steps_of(reference))
    assert len(losses) == STEPS
    return losses


def test_a_killed_rank_ends_the_job(recipe: Path, straight: list[Any], tmp_path: Path) -> None:
    """SIGKILL to one rank under torchrun, with checkpoints written in the background: no process is left."""
    run = tmp_path / "run"
    overrides = [f"run_dir={run}", *PAIR, "checkpoint.async_save=true"]
    with subprocess.Popen(
        command_line("train", recipe, *overrides, ranks=2),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as torchrun:
        try:
            wait_until(lambda: len(saved(run)) > 1 or torchrun.poll() is not None, "no checkpoint")
            ranks = children(torchrun.pid)
            every = [*ranks, *(helper for rank in ranks for helper in children(rank))]
            (victim,) = [pid for pid in ranks if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            assert torchrun.wait(60) != 0
            wait_until(lambda: not any(map(lives, every)), "a process is left")
            report("a killed rank", time.monotonic() - killed)
            assert time.monotonic() - killed < 60
        finally:
            if torchrun.poll() is None:
                os.killpg(torchrun.pid, signal.SIGKILL)
    assert lines(run) < STEPS, "killed too late"
    goes_on(recipe, run, straight)


def test_killed_within_a_save(recipe: Path, straight: list[Any], tmp_path: Path) -> None:
    """SIGKILL to all ranks while a checkpoint in the background has no name yet, and others stand before it.

    Plain saves are killed in test_resume.
    """
    run, mode = tmp_path / "run", "checkpoint.async_save=true"
    job = train(recipe, run, mode)
    while True:
        wait_until(lambda: is_saving(run) and bool(saved(run)), "no save was seen")
        for pid in job.pids:
            os.kill(pid, signal.SIGSTOP)  # so that looking does not change what is seen
        if is_saving(run):
            break
        for pid in job.pids:
            os.kill(pid, signal.SIGCONT)
    for pid in job.pids:
        os.kill(pid, signal.SIGKILL)
    assert [rank.returncode for rank in job.wait()] == [-signal.SIGKILL] * 2
    assert is_saving(run) and saved(run)[-1] < STEPS
    goes_on(recipe, run, straight, mode)


def test_a_disk_that_is_full_for_metrics(recipe: Path, straight: list[Any], tmp_path: Path) -> None:
    """The file may not grow any more in the middle of a line."""
    run = tmp_path / "run"
    rarely = f"checkpoint.save_interval={STEPS // 2}"
    job = train(recipe, run, rarely)
    wait_until(lambda: lines(run) > STEPS // 2, "no metrics")
    size = (run / "metrics.jsonl").stat().st_size + 100
    resource.prlimit(job.pids[0], resource.RLIMIT_FSIZE, (size, size))
    limited = time.monotonic()
    one_says(job.wait(), f"{run}/metrics.jsonl: File too large")
    report("metrics.jsonl on a full disk", time.monotonic() - limited)
    written = (run / "metrics.jsonl").read_text()
    assert written.endswith("}\n") and STEPS // 2 < len(steps_of(run)) < STEPS, "lines are whole or not there"
    assert saved(run) == [STEPS // 2]
    goes_on(recipe, run, straight, rarely)


def test_samples_that_are_cut_short(recipe: Path, straight: list[Any], tmp_path: Path) -> None:
    """A mapped page that is gone would end the process without a word; the run ends with one, and what it learnt."""
    run, samples = tmp_path / "run", tmp_path / "samples"
    shutil.copytree(recipe.parent / "samples", samples)
    here = f"data.samples={samples}"
    job = train(recipe, run, here, "checkpoint.save_interval=null")
    wait_until(lambda: lines(run) >= 3, "no metrics")
    whole = (samples / "tokens.npy").read_bytes()
    os.truncate(samples / "tokens.npy", 128)
    cut = time.monotonic()
    ranks = job.wait()
    report("a file of samples cut short", time.monotonic() - cut)
    last = [rank.stderr.splitlines()[-1] for rank in ranks]
    assert any(f"{samples}/tokens.npy is truncated" in line for line in last), last
    assert [rank.returncode for rank in ranks] == [2, 2] and not any("Traceback" in rank.stderr for rank in ranks)
    steps = len(steps_of(run))
    assert 3 <= steps < STEPS and saved(run) == [steps], "what was learnt is kept"
    (samples / "tokens.npy").write_bytes(whole)
    goes_on(recipe, run, straight, here)


@pytest.fixture
def small_disk(reference: Path, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file system with room for two checkpoints and a half, and the bytes of one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(file.stat().st_size for file in (reference / f"checkpoints/iter_{SAVE:07d}").iterdir())
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={5 * size // 2}", "none", disk]).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield disk, size
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_disk_full_of_checkpoints(
    recipe: Path, straight: list[Any], small_disk: tuple[Path, int], async_save: str
) -> None:
    """The third checkpoint does not fit; both ranks say the same."""
    disk, size = small_disk
    run, mode = disk / "run", f"checkpoint.async_save={async_save}"
    job = train(recipe, run, mode)
    wait_until(lambda: saved(run) == [SAVE, 2 * SAVE], "no checkpoints")
    began = time.monotonic()
    ranks = job.wait()
    report(f"a disk full of checkpoints, {mode}", time.monotonic() - began)
    assert [rank.returncode for rank in ranks] == [2, 2], [rank.stderr for rank in ranks]
    assert not any("Traceback" in rank.stderr for rank in ranks), ranks[0].stderr
    said = [rank.stderr.splitlines()[-1].split("error: ")[1] for rank in ranks]
    if async_save == "true" and "metrics.jsonl" in said[0]:
        # The steps beside the write found the disk full as well; that the checkpoint failed is a warning then.
        assert "failed on another rank" in said[1]
        said = [ranks[0].stderr] * 2
    assert said[0] == said[1]
    assert f"{run}/checkpoints/iter_{3 * SAVE:07d} could not be written" in said[0]
    assert "No space left on device" in said[0]
    assert saved(run) == [SAVE, 2 * SAVE] and not is_saving(run), "the room of the half checkpoint is free again"
    if async_save == "true":
        subprocess.run(["mount", "-o", f"remount,size={20 * size}", disk], check=True)
        goes_on(recipe, run, straight, mode)
