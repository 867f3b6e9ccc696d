"""How far a sweep's points are, and which of them may go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.config import dump_recipe, load_recipe
from megatron_kd.config.sweep import Point
from megatron_kd.errors import ConfigError
from megatron_kd.sweep.folder import check_trained, state_of
from megatron_kd.sweep.launch import Relay
from tests.assets import tiny_recipe


def point(folder: Path, *overrides: str) -> Point:
    return Point("one", {}, load_recipe(tiny_recipe(folder), ["training.train_iters=20", *overrides]))


def leave_run(folder: Path, *overrides: str, steps: bool = True, **status: Any) -> None:
    """What a run of the point with these overrides leaves."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(dump_recipe(point(folder, *overrides).recipe))
    (run_dir / "status.json").write_text(json.dumps(status))
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n' if steps else "")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"state": "finished", "iteration": 20}, "finished"),
        ({"state": "finished", "iteration": 10}, "stopped"),
        ({"state": "finished", "iteration": 10, "reason": "stopped early at iteration 10: …"}, "finished"),
        ({"state": "failed", "iteration": 10}, "failed"),
    ],
)
def test_states(tmp_path: Path, status: dict[str, Any], expected: str) -> None:
    leave_run(tmp_path, **status)
    assert state_of(point(tmp_path)).name == expected


@pytest.mark.parametrize("state", ["finished", "stopped", "failed", "running"])
def test_a_run_is_not_mixed_of_two_recipes(tmp_path: Path, state: str) -> None:
    leave_run(tmp_path, state=state, iteration=10)
    check_trained([point(tmp_path)])
    check_trained([point(tmp_path, "training.train_iters=30", "training.threads=2")])
    with pytest.raises(ConfigError, match=r"run was trained with optimizer\.lr .*, now 0\.5: remove what is to be"):
        check_trained([point(tmp_path, "training.train_iters=30", "optimizer.lr=0.5")])
    with pytest.raises(ConfigError, match=r"trained with training\.train_iters 20, now 15"):
        check_trained([point(tmp_path, "training.train_iters=15")])


def test_a_recipe_whose_run_made_no_step_may_be_mended(tmp_path: Path) -> None:
    leave_run(tmp_path, state="failed", iteration=0, steps=False)
    check_trained([point(tmp_path, "optimizer.lr=0.5")])


def test_a_closed_terminal_ends_a_sweep_as_sigterm_does_but_under_nohup() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is started")

    before = signal.getsignal(signal.SIGHUP)
    try:
        with Relay(never) as relay:
            signal.raise_signal(signal.SIGHUP)
            assert relay.received == "SIGHUP"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Relay(never) as relay:
            signal.raise_signal(signal.SIGHUP)
            assert relay.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
