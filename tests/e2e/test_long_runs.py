"""Runs that look after themselves: a rank that hangs, memory that runs out, a student that gets no better."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.errors import KDError
from megatron_kd.testing import RankFailedError, run_distributed
from megatron_kd.training.logs import log_to_file
from megatron_kd.training.phases import Phases
from megatron_kd.training.watchdog import Watchdog
from tests.assets import steps_of, succeed
from tests.e2e.road import captured_road, one_error_line
from tests.training_runs import Layout, leave_layout, recipe_in
from tests.warm import Started, start, warm

HANG_S, COLLECTIVE_S = 8.0, 8.0
EVERY, KEPT, DELTA = 2, 1, 0.004


@pytest.fixture(scope="module")
def recipe() -> Path:
    return captured_road() / "recipe.yaml"


def _hung(recipe: Path, run_dir: Path, *overrides: str) -> Started:
    pair = ["cluster.gpus_per_node=2", "training.train_iters=100000", "checkpoint.save_interval=null"]
    return start("train", recipe, f"run_dir={run_dir}", *pair, *overrides, ranks=2)


def _until(condition: Any, what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_rank_that_stands_still_ends_all(recipe: Path, tmp_path: Path) -> None:
    """One of two ranks is stopped (SIGSTOP): seen by the other's watchdog, or by the timeout of its collective."""
    runs = {
        "watchdog": _hung(recipe, tmp_path / "watchdog", f"training.hang_timeout_minutes={HANG_S / 60}"),
        "collective": _hung(
            recipe,
            tmp_path / "collective",
            "training.hang_timeout_minutes=null",
            f"training.distributed_timeout_minutes={COLLECTIVE_S / 60}",
        ),
    }
    ended = {}
    for name in runs:
        metrics = tmp_path / name / "metrics.jsonl"
        _until(lambda metrics=metrics: metrics.exists() and metrics.read_text().count("\n") > 3, f"{name}: no steps")
    for job in runs.values():
        os.kill(job.pids[1], signal.SIGSTOP)
    for name, job in runs.items():
        status = tmp_path / name / "status.json"
        _until(lambda status=status: json.loads(status.read_text())["state"] == "failed", f"{name}: nobody noticed")
        os.kill(job.pids[1], signal.SIGCONT)  # as a launcher ends it; awake, it finds the other gone
        ended[name] = job.wait(60)
    for name, (first, second) in ended.items():
        assert first.returncode == (1 if name == "watchdog" else 2), first.stderr
        assert second.returncode != 0, "the rank that stood still ends as well"
        (line,) = [line for line in first.stderr.splitlines() if "error:" in line]
        assert "no sign of life from rank 1 (iteration " in line, line
        log = (tmp_path / name / "logs/rank_0.log").read_text()
        assert "Current thread" in log or "Thread 0x" in log, "all stacks are in the log"
        assert "train_step" in log or "_agree" in log, "what the main thread was in"
    assert "in iteration " in ended["watchdog"][0].stderr and "phase " in ended["watchdog"][0].stderr


def _slow_and_hanging(rank: int, world: int, log: Path) -> None:
    """Work that is heard of, a phase that may be slow, and a wait without an end."""
    phases = Phases()

    def ended() -> None:
        log.with_suffix(".status").write_text("failed")

    watchdog = Watchdog(phases, log, limit_s=1.0, collective_timeout_s=0.5, on_end=ended)
    with log_to_file(log, warn_on_terminal=False), watchdog:
        for _ in range(30):
            time.sleep(0.05)
            phases.beat()
        with phases("checkpoint"):
            time.sleep(1.5)
        log.with_suffix(".far").touch()
        with phases("data"):
            threading.Event().wait()


def test_the_watchdog_lets_slow_phases_be_and_ends_a_hang(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    with pytest.raises(RankFailedError, match="died with exit code 1"):
        run_distributed(_slow_and_hanging, 1, log)
    assert log.with_suffix(".far").exists(), "it was not ended while it got something done"
    text = log.read_text()
    assert "in iteration 0, phase data: it is alone" in text and str(log) in text
    assert "in wait" in text and "_slow_and_hanging" in text, "the line that hangs"
    assert log.with_suffix(".status").read_text() == "failed"


def _train(recipe: Path, *overrides: str) -> dict[str, Any]:
    from megatron_kd.training.loop import train

    leave_layout()
    return train(recipe_in(recipe, Layout(1), *overrides), show_progress=False).to_dict()


def _alone(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    """Early stopping in one go, in two, and again; then a run whose memory ends in its third step."""
    stopping = [
        f"training.eval_interval={EVERY}",
        "training.early_stopping.patience=2",
        f"training.early_stopping.min_delta={DELTA}",
        "training.train_iters=60",
        "optimizer.lr=3e-3",
        "optimizer.lr_decay_iters=60",
        "checkpoint.save_interval=3",
        f"checkpoint.keep={KEPT}",
    ]
    found: dict[str, Any] = {"whole": _train(recipe, f"run_dir={folder / 'whole'}", *stopping)}
    found["again"] = _train(recipe, f"run_dir={folder / 'whole'}", *stopping)
    middle = (found["whole"]["iteration"] - 3) // 3 * 3
    _train(recipe, f"run_dir={folder / 'parts'}", *stopping, f"training.train_iters={middle}")
    found["parts"] = _train(recipe, f"run_dir={folder / 'parts'}", *stopping)
    found["memory"] = _out_of_memory(recipe, folder / "memory")
    return found


def _out_of_memory(recipe: Path, run_dir: Path) -> str:
    from megatron_kd.training import step

    through = step.total_sums
    calls = []

    def fails_in_the_third(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")
        return through(*arguments)

    step.total_sums = fails_in_the_third  # type: ignore[assignment]
    try:
        return str(_train(recipe, f"run_dir={run_dir}", "training.memory_snapshot=true", "training.micro_batch_size=2"))
    except KDError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        step.total_sums = through


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def found(recipe: Path, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_distributed(_alone, 1, recipe, folder)[0]
    return result


def _evaluations(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["eval/kd"] for line in lines if "eval/kd" in line}


def _checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run_dir / "checkpoints").glob("iter_*"))


def test_early_stopping_by_hand(folder: Path, found: dict[str, Any]) -> None:
    """The first evaluation that 2 later ones do not undercut by more than DELTA nats is the best; there it ends."""
    report, run_dir = found["whole"], folder / "whole"
    kd = _evaluations(run_dir)
    best, waited, stop = 0, 0, None
    for iteration in range(EVERY, max(kd) + 1, EVERY):
        if kd[iteration] < kd[best] - DELTA:
            best, waited = iteration, 0
        else:
            waited += 1
        if waited == 2:
            stop = iteration
            break
    assert stop is not None and 0 < best < stop < 60 and report["iteration"] == stop == best + 2 * EVERY
    assert report["finished"] and f"of iteration {best} was not improved upon in 2 evaluations" in report["reason"]
    assert _checkpoints(run_dir) == [best, stop], "the newest one, and the best beside it"
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["best_iteration"], status["iteration"]) == ("finished", best, stop)
    assert status["reason"] == report["reason"]


def test_a_run_that_stopped_early_stays_so(folder: Path, found: dict[str, Any]) -> None:
    assert found["again"] == {**found["whole"], "resumed_from": found["whole"]["iteration"], "last": {}}
    assert [step["iteration"] for step in steps_of(folder / "whole")] == list(range(1, found["whole"]["iteration"] + 1))


def test_a_resumed_run_stops_where_it_would_have(folder: Path, found: dict[str, Any]) -> None:
    whole, parts = found["whole"], found["parts"]
    assert 0 < parts["resumed_from"] < whole["iteration"]
    assert (parts["iteration"], parts["reason"]) == (whole["iteration"], whole["reason"])
    assert _checkpoints(folder / "parts") == _checkpoints(folder / "whole")


def test_the_best_checkpoint_by_command(folder: Path, found: dict[str, Any], tmp_path: Path) -> None:
    run_dir = folder / "whole"
    kd = _evaluations(run_dir)
    best, other = sorted(_checkpoints(run_dir), key=kd.__getitem__)
    done = succeed(warm("evaluate", run_dir, "--best", "--json"))
    assert json.loads(done.stdout)["eval/kd"] == pytest.approx(kd[best], rel=1e-6)
    done = succeed(warm("convert", "export", run_dir, "--best", f"--output={tmp_path / 'hf'}"))
    assert f"iter_{best:07d}" in done.stdout and f"iter_{other:07d}" not in done.stdout


def test_out_of_memory_is_one_line(folder: Path, found: dict[str, Any]) -> None:
    message = found["memory"]
    assert message.startswith("MemoryExhaustedError: out of memory in phase optimizer: peak ")
    assert "Tried to allocate 20.00 GiB." in message and "\n" not in message
    assert "training.micro_batch_size=1, training.recompute_granularity=selective" in message
    assert "snapshot" not in message, "there is none of the CPU"
    assert len(steps_of(folder / "memory")) == 2
    assert json.loads((folder / "memory/status.json").read_text())["state"] == "failed"


def test_best_of_what_is_no_run(recipe: Path) -> None:
    one_error_line(warm("evaluate", recipe, "--best"), "--best is for a run directory")
