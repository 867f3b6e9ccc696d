"""A run that is killed, stopped or moved to other ranks goes on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.testing import run_distributed
from tests.assets import command_line, environment, steps_of, tiny_recipe
from tests.training_runs import (
    CURVES,
    Layout,
    largest_difference,
    leave_layout,
    losses_of,
    make_inputs,
    recipe_in,
)

STEPS, SAVE = 20, 4
ALONE, PAIR = Layout(1), Layout(2)
MOVED = {"TP 1 to TP 2 + SP": Layout(2, tp=2, sp=True), "DP 1 to DP 2": PAIR}
PATIENCE_S = 120.0


def _overrides(run_dir: Path) -> list[str]:
    return [f"run_dir={run_dir}", f"training.train_iters={STEPS}", f"checkpoint.save_interval={SAVE}"]


def _train(recipe: Path, layout: Layout, run_dir: Path, *overrides: str) -> dict[str, Any]:
    from megatron_kd.training.loop import train

    leave_layout()
    return train(recipe_in(recipe, layout, *_overrides(run_dir), *overrides), show_progress=False).to_dict()


def _saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run_dir / "checkpoints").glob("iter_*"))


def _forget_after(run_dir: Path, iteration: int, copy: Path) -> Path:
    """A copy of a run as it was when ``iteration`` was its newest checkpoint; its metrics go further."""
    shutil.copytree(run_dir, copy)
    for path in (copy / "checkpoints").glob("iter_*"):
        if int(path.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(path)
    return copy


@contextmanager
def _started(recipe: Path, layout: Layout, run_dir: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The public command on one or more ranks, as a launcher starts it; what is left of it ends with the block."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = command_line("train", recipe, *layout.overrides(), *_overrides(run_dir))
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(layout.world)}
    ranks = [
        subprocess.Popen(
            arguments,
            env=environment() | ({**joined, "RANK": str(r), "LOCAL_RANK": str(r)} if layout.world > 1 else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for r in range(layout.world)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _wait_until(ready: Callable[[], bool], ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        ended = [process for process in ranks if process.poll() is not None]
        assert not ended, f"a rank ended too early: {ended[0].stderr.read() if ended[0].stderr else ''}"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.0005)


def _lines(run_dir: Path) -> int:
    """Steps in the metrics; evaluations have lines of their own."""
    file = run_dir / "metrics.jsonl"
    return sum('"loss/kd"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def _is_saving(run_dir: Path) -> bool:
    return any(path.name.endswith(".partial") for path in (run_dir / "checkpoints").glob(".iter_*"))


def _kill_all(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()


def _interrupt(recipe: Path, layout: Layout, run_dir: Path) -> None:
    """Kills a run within its first save, then within a later step, then stops it by SIGTERM to its last rank."""
    with _started(recipe, layout, run_dir) as ranks:
        _wait_until(lambda: _is_saving(run_dir), ranks)
        _kill_all(ranks)
        assert _is_saving(run_dir) and not _saved(run_dir), "killed too late: the save was finished"
    with _started(recipe, layout, run_dir) as ranks:
        _wait_until(lambda: _lines(run_dir) >= SAVE + 2 and SAVE in _saved(run_dir), ranks)
        _kill_all(ranks)
    with _started(recipe, layout, run_dir) as ranks:
        before = max(_saved(run_dir))
        _wait_until(lambda: _lines(run_dir) <= before, ranks)  # what the killed run measured behind it is dropped
        _wait_until(lambda: _lines(run_dir) >= before + 2, ranks)
        ranks[-1].send_signal(signal.SIGTERM)
        for process in ranks:
            assert process.wait(PATIENCE_S) == 0, process.stderr.read() if process.stderr else ""
    assert before < max(_saved(run_dir)) < STEPS, "stopped too late"


@dataclass(frozen=True)
class Runs:
    """Folders of the module's runs, and what their processes reported."""

    recipe: Path
    folder: Path
    alone: list[dict[str, Any]]
    pair: list[dict[str, Any]]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return steps_of(self.folder / name)


def _alone_rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    make_inputs(recipe_in(recipe, ALONE))
    report: dict[str, Any] = {"whole": _train(recipe, ALONE, folder / "alone")}
    _forget_after(folder / "alone", 8, folder / "pruned")
    report["pruned"] = _train(recipe, ALONE, folder / "pruned", "checkpoint.keep=2")
    return report


def _signal_at(run_dir: Path, line: int, number: signal.Signals) -> threading.Thread:
    def wait_and_send() -> None:
        while _lines(run_dir) < line:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait_and_send, daemon=True)
    thread.start()
    return thread


def _pair_rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"whole": _train(recipe, PAIR, folder / "pair")}
    if rank == 1:
        _signal_at(folder / "signalled", 7, signal.SIGUSR1)
    report["signalled"] = _train(recipe, PAIR, folder / "signalled")
    report["signalled again"] = _train(recipe, PAIR, folder / "signalled")
    report["interrupted"] = _train(recipe, PAIR, folder / "pair_interrupted")
    for name, layout in MOVED.items():
        report[name] = _train(recipe, layout, folder / name)
    report["children"] = [process.name for process in multiprocessing.active_children()]
    return report


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("resume")
    recipe = tiny_recipe(folder)
    alone: list[dict[str, Any]] = run_distributed(_alone_rank, 1, recipe, folder)
    for name in MOVED:
        _forget_after(folder / "alone", 8, folder / name)
    _interrupt(recipe, PAIR, folder / "pair_interrupted")
    pair: list[dict[str, Any]] = run_distributed(_pair_rank, 2, recipe, folder, timeout_s=240.0)
    return Runs(recipe, folder, alone, pair)


def test_killed_and_stopped_on_one_rank_goes_on_bit_equal(runs: Runs) -> None:
    run_dir = runs.folder / "alone_interrupted"
    _interrupt(runs.recipe, ALONE, run_dir)
    with _started(runs.recipe, ALONE, run_dir) as (process,):
        assert process.wait(PATIENCE_S) == 0
    assert losses_of(steps_of(run_dir)) == losses_of(runs.metrics("alone"))


def test_killed_and_stopped_on_two_ranks_goes_on_bit_equal(runs: Runs) -> None:
    assert all(0 < report["interrupted"]["resumed_from"] < STEPS for report in runs.pair)
    assert losses_of(runs.metrics("pair_interrupted")) == losses_of(runs.metrics("pair"))


def test_every_iteration_stands_once(runs: Runs) -> None:
    for name in ("alone", "pair", "pair_interrupted", "signalled", "pruned", *MOVED):
        assert [record["iteration"] for record in runs.metrics(name)] == list(range(1, STEPS + 1)), name


def test_a_signal_to_one_rank_stops_both_at_the_same_step(runs: Runs) -> None:
    stopped = [report["signalled"] for report in runs.pair]
    assert not any(report["finished"] for report in stopped)
    iteration = stopped[0]["iteration"]
    assert stopped[1]["iteration"] == iteration and 7 <= iteration < STEPS
    assert all(report["signalled again"]["resumed_from"] == iteration for report in runs.pair)
    assert losses_of(runs.metrics("signalled")) == losses_of(runs.metrics("pair"))


@pytest.mark.parametrize("name", MOVED)
def test_another_layout_goes_on_with_the_same_losses(runs: Runs, name: str) -> None:
    assert all(report[name]["resumed_from"] == 8 for report in runs.pair)
    assert losses_of(runs.metrics(name)) != losses_of(runs.metrics("alone")), "nothing was trained here"
    assert largest_difference(runs.metrics("alone"), runs.metrics(name), CURVES) < 1e-4


def test_old_checkpoints_are_removed_and_nothing_half_done_is_left(runs: Runs) -> None:
    assert _saved(runs.folder / "pruned") == [STEPS - SAVE, STEPS]
    for name in ("pruned", "pair_interrupted", "alone"):
        left = {path.name for path in (runs.folder / name / "checkpoints").iterdir()}
        assert all(entry.startswith("iter_") for entry in left), left


def test_saving_leaves_no_process_that_a_killed_run_would_orphan(runs: Runs) -> None:
    assert [report["children"] for report in runs.pair] == [[], []]
