"""Verdicts on steps and on evaluations, by hand; advice where memory runs out; signs of life."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.config import TrainingConfig, load_recipe
from megatron_kd.device import Heartbeats
from megatron_kd.errors import CheckpointError
from megatron_kd.training.early_stopping import Best, best_of, evaluations, find_best, protected_checkpoint
from megatron_kd.training.guard import DivergedError, Guard
from megatron_kd.training.memory_report import remedies
from megatron_kd.training.phases import Phases
from tests.assets import tiny_recipe


def policy(**values: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"global_batch_size": 4, "train_iters": 10, **values})


@pytest.mark.parametrize(
    ("loss", "norm", "finite"),
    [(math.nan, 1.0, False), (math.inf, 1.0, False), (2.0, math.nan, False), (2.0, math.inf, False), (2.0, 1.0, True)],
)
def test_what_is_not_finite_is_a_fault(loss: float, norm: float, finite: bool) -> None:
    fault = Guard().fault(policy(), loss, norm)
    assert (fault is None) == finite and (fault is None or not fault.finite)


def test_a_spike_is_measured_by_the_median_of_a_whole_window() -> None:
    settings = policy(loss_spike_factor=2.0, loss_spike_window=3)
    guard = Guard()
    for loss in (1.0, 9.0):
        assert guard.fault(settings, 100.0, 1.0) is None, "nothing is a spike before the window is full"
        guard.taken(settings, loss)
    guard.taken(settings, 2.0)  # 1, 9, 2: the median is 2
    assert guard.fault(settings, 4.0, 1.0) is None
    fault = guard.fault(settings, 4.001, 1.0)
    assert fault is not None and fault.finite and "2 × 2, the median of the last 3" in fault.reason
    guard.taken(settings, 0.5)  # 9, 2, 0.5
    assert guard.recent == [9.0, 2.0, 0.5]
    assert Guard(recent=[1.0] * 3).fault(policy(), 1e9, 1.0) is None, "off by default"


def test_skips_are_counted_until_there_are_too_many() -> None:
    settings = policy(on_nonfinite="skip", max_skipped_steps=2)
    guard = Guard()
    fault = guard.fault(settings, math.nan, math.nan)
    assert fault is not None
    for _ in range(2):
        guard.skip(settings, "iteration 5", fault)
    with pytest.raises(DivergedError, match=r"iteration 5: loss nan.*2 steps before it were skipped"):
        guard.skip(settings, "iteration 5", fault)
    assert (guard.skipped_steps, guard.skipped_in_a_row) == (2, 2)
    guard.taken(settings, 1.0)
    guard.skip(settings, "iteration 7", fault)
    assert (guard.skipped_steps, guard.skipped_in_a_row) == (3, 1)
    with pytest.raises(DivergedError, match="the step was not taken"):
        Guard().skip(policy(), "iteration 1", fault)


@settings(max_examples=25)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.integers(0, 99), st.integers(0, 99))
def test_a_guard_survives_json(losses: list[float], skipped: int, in_a_row: int) -> None:
    guard = Guard(skipped, in_a_row, losses)
    assert Guard.of(json.loads(json.dumps({"iteration": 7, **guard.state()}))) == guard
    assert Guard.of({"iteration": 7}) == Guard(), "of a checkpoint from before"


def test_the_best_of_a_history() -> None:
    history = [(0, 2.0), (10, 1.0), (20, 0.95), (30, 0.9), (40, math.inf)]
    assert best_of(history) == Best(30, 0.9, 1)
    assert best_of(history, min_delta=0.075) == Best(30, 0.9, 1), "0.95 is too little below 1.0, 0.9 is not"
    assert best_of(history, min_delta=0.2) == Best(10, 1.0, 3)
    assert best_of([]) is None


def test_only_what_was_saved_and_evaluated_can_be_the_best(tmp_path: Path) -> None:
    for iteration, kd in {0: 0.1, 10: 0.9, 20: 0.5, 30: math.nan}.items():
        path = tmp_path / f"evaluations/iter_{iteration:07d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"eval/kd": kd}))
    (tmp_path / "evaluations/iter_0000025.json").write_text("{")
    assert evaluations(tmp_path) == [(0, 0.1), (10, 0.9), (20, 0.5), (30, math.inf)]
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* was evaluated"):
        find_best(tmp_path)
    for iteration in (10, 20, 30, 40):
        (tmp_path / f"checkpoints/iter_{iteration:07d}").mkdir(parents=True)
    assert find_best(tmp_path) == tmp_path / "checkpoints/iter_0000020"


def test_evaluations_on_other_targets_do_not_compare(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    for iteration, (measure, kd) in {10: ("cache", 0.02), 20: ("online", 0.15), 30: ("online", 0.14)}.items():
        kept = {"measure": measure, "eval/kd": kd}
        (tmp_path / f"evaluations/iter_{iteration:07d}.json").write_text(json.dumps(kept))
        (tmp_path / f"checkpoints/iter_{iteration:07d}").mkdir(parents=True)
    assert evaluations(tmp_path) == [(20, 0.15), (30, 0.14)]
    assert find_best(tmp_path) == tmp_path / "checkpoints/iter_0000030"


def test_the_protected_checkpoint_is_that_of_the_periodic_evaluations(tmp_path: Path) -> None:
    """One of the command ``evaluate``, or of the end of a shorter run, does not count, however good."""
    policy = ["training.eval_interval=10", "training.early_stopping.patience=3"]
    recipe = load_recipe(tiny_recipe(tmp_path), policy)
    (tmp_path / "evaluations").mkdir()
    for iteration, kd in {0: 1.0, 10: 0.6, 13: 0.1, 20: 0.7}.items():
        (tmp_path / f"evaluations/iter_{iteration:07d}.json").write_text(json.dumps({"eval/kd": kd}))
        (tmp_path / f"checkpoints/iter_{iteration:07d}").mkdir(parents=True)
    assert protected_checkpoint(recipe, tmp_path, 20) == tmp_path / "checkpoints/iter_0000010"
    assert protected_checkpoint(load_recipe(tiny_recipe(tmp_path)), tmp_path, 20) is None


def test_advice_names_only_what_is_not_set(tmp_path: Path) -> None:
    file = tiny_recipe(tmp_path)
    plain = remedies(load_recipe(file, ["training.micro_batch_size=2"]), "forward_backward")
    assert plain[0] == "training.micro_batch_size=1" and plain[-1] == "parallelism.context_parallel_size=2"
    assert "training.recompute_granularity=selective" in plain
    tight = remedies(load_recipe(file, ["training.recompute_granularity=full"]), "optimizer")
    assert tight == ["parallelism.context_parallel_size=2"]


def test_phases_name_where_an_error_came_from() -> None:
    phases = Phases()
    with phases("evaluation"), phases("data"):
        assert phases.current == "data"
    with pytest.raises(ZeroDivisionError), phases("evaluation"), phases("data"):
        _ = 1 // 0
    assert (phases.current, phases.failed_in) == ("other", "data")


def test_heartbeats_tell_the_silent_from_the_living() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        looking, silent, living = Heartbeats(), Heartbeats(), Heartbeats()
        for rank, heartbeats in enumerate((looking, silent, living)):
            heartbeats._rank = rank
        looking._ranks = 4
        silent.beat("iteration 3, phase data")
        living.beat("iteration 3, phase data")
        beating = threading.Timer(0.05, lambda: living.beat("iteration 4, phase data"))
        beating.start()
        assert looking.silent(0.1) == {1: "iteration 3, phase data", 3: "never heard of"}
        beating.join()
    finally:
        dist.destroy_process_group()
