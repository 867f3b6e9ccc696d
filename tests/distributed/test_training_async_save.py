"""Checkpoints written while the training goes on: the same bytes, one error for all ranks, none in flight lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.errors import KDError
from megatron_kd.testing import run_distributed
from tests.assets import steps_of, tiny_recipe
from tests.training_runs import Layout, leave_layout, losses_of, make_inputs, recipe_in

STEPS, SAVE, FULL_AT = 12, 4, 8
PAIR = Layout(2, tp=2, sp=True)
HOLD_S = 1.0


@contextmanager
def slow_disk(
    before_write: dict[int, Callable[[], None]] | None = None,
    before_step: dict[int, Callable[[], None]] | None = None,
    after_write: dict[int, Callable[[], None]] | None = None,
    steps: int = 2,
) -> Iterator[dict[int, int]]:
    """Holds each write back until the training is some steps further, or for a second where it does not get there.

    Args:
        before_write: what happens before the write of an iteration.
        before_step: what happens before a step, counted from 1.
        after_write: what happens after the write of an iteration.

    Yields:
        For each iteration that was saved the steps that had begun when its write began.
    """
    from megatron_kd.training import loop
    from megatron_kd.training.checkpoint import BegunCheckpoint

    further, begun, seen = threading.Condition(), [0], {}
    step, write = loop.train_step, BegunCheckpoint.write

    def counted(recipe: Any, student: Any, *arguments: Any) -> Any:
        with further:
            begun[0] = student.iteration + 1
            further.notify_all()
        (before_step or {}).get(begun[0], lambda: None)()
        return step(recipe, student, *arguments)

    def held(self: BegunCheckpoint) -> None:
        (before_write or {}).get(self.iteration, lambda: None)()
        with further:
            further.wait_for(lambda: begun[0] >= min(self.iteration + steps, STEPS), HOLD_S)
            seen[self.iteration] = begun[0]
        write(self)
        (after_write or {}).get(self.iteration, lambda: None)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", counted)
        patch.setattr(BegunCheckpoint, "write", held)
        yield seen


def _train(recipe: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    from megatron_kd.training.loop import train

    leave_layout()
    try:
        return train(recipe_in(recipe, PAIR, f"run_dir={run_dir}", *overrides), show_progress=False).to_dict()
    except KDError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with EFBIG, as it does on a full disk
    on_second = (lambda do: do) if rank == 1 else (lambda do: lambda: None)
    found: dict[str, Any] = {"sync": _train(recipe, folder / "sync")}
    later = "checkpoint.async_save=true"
    with slow_disk() as found["overlap"]:
        found["async"] = _train(recipe, folder / "async", later)
    # Lifted at once: the ranks of the tests meet in a file of their own, which must not be too large.
    lift = {FULL_AT: lambda: _limit_files(resource.RLIM_INFINITY)}
    with slow_disk({FULL_AT: on_second(lambda: _limit_files(1024))}, after_write=lift):
        found["full"] = _train(recipe, folder / "full", later)
    torch.distributed.barrier()
    found["left"] = sorted(os.listdir(folder / "full/checkpoints"))
    found["stopped at"] = len(steps_of(folder / "full"))
    found["again"] = _train(recipe, folder / "full", later)
    stop = on_second(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with slow_disk(before_step={SAVE + 2: stop}, steps=SAVE):
        found["signalled"] = _train(recipe, folder / "signalled", later)
    with slow_disk():
        found["diverged"] = _train(
            recipe, folder / "diverged", later, "checkpoint.save_interval=1", "optimizer.lr=1e25"
        )
    return found


def _alone(rank: int, world: int, recipe: Path) -> dict[str, list[float]]:
    """Inputs for all; then what is written of a tensor that changes behind a save's back."""
    from megatron.core.dist_checkpointing import load_plain_tensors
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_kd.models.checkpoint import make_partial_directory
    from megatron_kd.models.sharded_write import ShardedWrite

    make_inputs(recipe_in(recipe, Layout(1)))
    written = {}
    for detached in (True, False):
        tensor, final = torch.arange(4.0), recipe.parent / f"changed_{detached}"
        partial = make_partial_directory(final)
        state = {"weight": ShardedTensor.from_rank_offsets("weight", tensor)}
        begun = ShardedWrite(state, partial, final, detached=detached)
        tensor += 10
        begun.write()
        begun.finish()
        written[str(detached)] = load_plain_tensors(str(partial))["weight"].tolist()
    return written


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(
        tmp_path_factory.mktemp("async_save"),
        training={"train_iters": STEPS},
        checkpoint={"save_interval": SAVE},
        data={"heldout_tokens": 96},
    )


@pytest.fixture(scope="module")
def alone(recipe: Path) -> dict[str, list[float]]:
    result: dict[str, list[float]] = run_distributed(_alone, 1, recipe)[0]
    return result


@pytest.fixture(scope="module")
def ranks(recipe: Path, alone: dict[str, list[float]]) -> list[dict[str, Any]]:
    return run_distributed(_rank, 2, recipe, recipe.parent, timeout_s=300.0)


def test_what_is_written_is_what_was_saved(alone: dict[str, list[float]]) -> None:
    assert alone["True"] == [0.0, 1.0, 2.0, 3.0]
    assert alone["False"] == [10.0, 11.0, 12.0, 13.0], "a plain save makes no copy: the first line says something"


def test_checkpoints_are_the_same_bytes(recipe: Path, ranks: list[dict[str, Any]]) -> None:
    """Each was written while the training was two steps further, on both ranks."""
    assert all(rank["overlap"] == {4: 6, 8: 10, 12: 12} for rank in ranks)
    assert all(rank["sync"]["finished"] and rank["async"]["finished"] for rank in ranks)
    sync, other = recipe.parent / "sync", recipe.parent / "async"
    assert losses_of(steps_of(sync)) == losses_of(steps_of(other))
    for run in (sync, other):
        assert sorted(os.listdir(run / "checkpoints")) == [f"iter_{i:07d}" for i in (4, 8, 12)]
    for path in (sync / "checkpoints").iterdir():
        notes = [json.loads((run / "checkpoints" / path.name / "model.json").read_text()) for run in (sync, other)]
        hashes = [{name: told for name, told in note["files"].items() if "distcp" in name} for note in notes]
        assert hashes[0] == hashes[1] and set(hashes[0]) == {"__0_0.distcp", "__1_0.distcp"}


def test_a_disk_that_is_full_for_one_rank(recipe: Path, ranks: list[dict[str, Any]]) -> None:
    """Both get the same error a step after the write failed; what was there stays, and the run goes on from it."""
    first, second = ranks
    assert first["full"] == second["full"]
    path = recipe.parent / f"full/checkpoints/iter_{FULL_AT:07d}"
    assert f"CheckpointError: {path} could not be written" in first["full"]["error"]
    assert "File too large" in first["full"]["error"] and "\n" not in first["full"]["error"]
    assert first["left"] == ["iter_0000004"]
    assert FULL_AT + 1 < first["stopped at"] < STEPS
    assert all(rank["again"]["finished"] and rank["again"]["resumed_from"] == 4 for rank in ranks)
    assert losses_of(steps_of(recipe.parent / "full")) == losses_of(steps_of(recipe.parent / "sync"))
    assert not list((recipe.parent / "full/checkpoints").glob(".*"))


def test_a_signal_waits_for_the_checkpoint_in_flight(recipe: Path, ranks: list[dict[str, Any]]) -> None:
    assert not any(rank["signalled"]["finished"] for rank in ranks)
    stopped = ranks[0]["signalled"]["iteration"]
    assert stopped == SAVE + 2
    kept = sorted(os.listdir(recipe.parent / "signalled/checkpoints"))
    assert kept == [f"iter_{SAVE:07d}", f"iter_{stopped:07d}"]


def test_a_diverged_run_keeps_the_checkpoint_in_flight(recipe: Path, ranks: list[dict[str, Any]]) -> None:
    assert all("DivergedError" in rank["diverged"]["error"] for rank in ranks), ranks[0]["diverged"]
    steps = len(steps_of(recipe.parent / "diverged"))
    assert steps >= 1
    kept = sorted(os.listdir(recipe.parent / "diverged/checkpoints"))
    assert kept == [f"iter_{i:07d}" for i in range(1, steps + 1)]
