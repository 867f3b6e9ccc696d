"""Steps that are not taken: on two ranks, rows that overflow, rows of other targets, a run that really diverges."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.errors import KDError
from megatron_kd.testing import run_distributed
from tests.assets import steps_of
from tests.e2e.road import captured_road
from tests.training_runs import Layout, Trainer, leave_layout, recipe_in

PAIR, SPLIT_MODEL = Layout(2), Layout(2, tp=2, sp=True)
SKIP = (
    "training.on_nonfinite=skip",
    "training.max_skipped_steps=2",
    "training.loss_spike_factor=1.5",
    "training.loss_spike_window=2",
)


def _wrong_targets(trainer: Trainer) -> None:
    """The next step's rows on this rank with the probabilities of other tokens: finite, and far from the student's."""
    reader = trainer._reader

    def read(iteration: int) -> list[Any]:
        trainer._reader = reader
        return [replace(batch, targets=_moved(batch.targets)) for batch in reader(iteration)]

    trainer._reader = read  # type: ignore[assignment]


def _moved(targets: Any) -> Any:
    return replace(targets, ids=torch.where(targets.ids >= 0, (targets.ids + 101) % 300, targets.ids))


def _overflow(trainer: Trainer) -> None:
    """The hidden states of the next micro batch on this rank are NaN, as after an overflow."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return output * math.nan

    hook = trainer.student.model.module.decoder.final_layernorm.register_forward_hook(spoil)


def _state(trainer: Trainer) -> str:
    """A digest of weights, master weights, moments and Adam's own step."""
    digest = hashlib.sha256()
    for parameter in trainer.student.model.module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    for part in trainer.student.optimizer.chained_optimizers:
        inner: Any = part.optimizer
        for group in inner.param_groups:
            digest.update(str(group["step"]).encode())
            for parameter in group["params"]:
                digest.update(parameter.detach().numpy().tobytes())
                for name in ("exp_avg", "exp_avg_sq"):
                    digest.update(inner.state[parameter][name].numpy().tobytes())
    return digest.hexdigest()


def _refused(trainer: Trainer) -> str:
    try:
        return str(trainer.step())
    except KDError as error:
        return f"{type(error).__name__}: {error}"


def _skipping(rank: int, recipe: Path, folder: Path) -> dict[str, Any]:
    from megatron_kd.training.checkpoint import load_checkpoint, save_checkpoint

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_kd.training.judge").addHandler(handler)
    loaded = recipe_in(recipe, PAIR, *SKIP)
    trainer = Trainer(loaded)
    found: dict[str, Any] = {"first": trainer.curve(3), "states": [_state(trainer)]}
    found["spoiled row"] = trainer._reader(3)[0].sample_ids
    if rank == 1:
        _overflow(trainer)
    found["nan"] = trainer.step()
    found["states"].append(_state(trainer))
    found["after"] = trainer.curve(2)
    found["states"].append(_state(trainer))
    _wrong_targets(trainer)
    found["spike"] = trainer.step()
    found["states"].append(_state(trainer))
    _overflow(trainer)
    found["nan again"] = trainer.step()
    found["place"] = trainer.student.iteration, trainer.student.consumed_samples
    saved = save_checkpoint(trainer.student, loaded.student.model, trainer.session.groups, folder / "run", keep=2)
    found["guards"] = [replace(trainer.student.guard)]
    if rank == 0:
        _overflow(trainer)
    found["third"] = [_refused(trainer)]
    found["states"].append(_state(trainer))
    found["on"] = trainer.curve(2)

    trainer = Trainer(loaded)
    load_checkpoint(trainer.student, loaded.student.model, trainer.session.groups, saved)
    found["guards"].append(replace(trainer.student.guard))
    if rank == 0:
        _overflow(trainer)
    found["third"].append(_refused(trainer))
    found["resumed"] = trainer.curve(2)

    trainer = Trainer(loaded)
    trainer.curve(3)
    trainer.student.iteration += 1
    trainer.student.consumed_samples += 4
    trainer.student.scheduler.step(increment=4)
    found["without"] = trainer.curve(2)
    found["told"] = told
    return found


def _diverging(recipe: Path, folder: Path, name: str, *overrides: str) -> str:
    """A learning rate at which the weights overflow."""
    from megatron_kd.training.loop import train

    leave_layout()
    run = ["optimizer.lr=1e30", "optimizer.lr_warmup_iters=0", "optimizer.clip_grad=0", f"run_dir={folder / name}"]
    try:
        return str(train(recipe_in(recipe, PAIR, *run, *overrides), show_progress=False))
    except KDError as error:
        return f"{type(error).__name__}: {error}"


def _guard_rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    found = _skipping(rank, recipe, folder)
    trainer = Trainer(recipe_in(recipe, SPLIT_MODEL, *SKIP))
    before = trainer.curve(1), _state(trainer)
    _overflow(trainer)
    found["split"] = before[1], trainer.step(), _state(trainer)
    found["stop"] = _diverging(recipe, folder, "stop")
    found["skip"] = _diverging(
        recipe, folder, "skip", "training.on_nonfinite=skip", "training.max_skipped_steps=3", "logging.log_interval=1"
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(_guard_rank, 2, captured_road() / "recipe.yaml", folder)


def test_a_skipped_step_changes_nothing_but_the_place(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        start, skipped, trained, spiked, stopped = found["states"]
        assert start == skipped != trained == spiked == stopped
        assert found["place"] == (8, 32)
        assert found["after"] == [{**step, "optim/skipped_steps": 1.0} for step in found["without"]], (
            "as a run that never saw those rows, bit by bit: losses, gradients and rates"
        )


def test_skipped_steps_are_counted_and_named(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    for found in ranks:
        assert [step["optim/skipped_steps"] for step in found["first"]] == [0.0] * 3
        assert found["nan"]["optim/skipped_steps"] == 1.0
        assert "loss/kd" not in found["nan"] and "optim/grad_norm" not in found["nan"]
        assert found["nan"]["optim/lr"] > 0 and found["nan"]["tokens"] > 0
        assert found["spike"]["optim/skipped_steps"] == 2.0
        assert found["spike"]["loss/total"] > 1.5 * found["after"][0]["loss/total"]
    (row,) = second["spoiled row"]
    assert f"iteration 4, rows {row} of " in first["told"][1] and "loss nan, gradient norm nan" in first["told"][1]
    assert first["told"][1] == second["told"][1], "both ranks name the row of the second"
    assert str(row) in second["told"][0] and first["told"][0] != second["told"][0], "each logs its own rows"
    assert "iteration 7" in first["told"][3] and "training.loss_spike_factor 1.5 × " in first["told"][3]


def test_too_many_in_a_row_end_the_run_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["third"] == second["third"]
    here, resumed = first["third"]
    assert here == resumed, "the spikes seen before and the steps skipped survive the checkpoint"
    assert here.startswith("DivergedError: iteration 9") and "2 steps before it were skipped" in here


def test_the_guard_survives_a_resume_exactly(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        before, after = found["guards"]
        assert before == after
        assert (after.skipped_steps, after.skipped_in_a_row) == (3, 2)
        assert after.recent == [step["loss/total"] for step in found["after"]]
        assert found["on"] == found["resumed"]


def test_tensor_parallel_ranks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        before, metrics, after = found["split"]
        assert before == after and metrics["optim/skipped_steps"] == 1.0


def test_a_run_that_diverges_ends_with_its_last_good_weights_saved(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """With a learning rate of 1e30 the second or third step is not finite."""
    assert ranks[0]["stop"] == ranks[1]["stop"]
    message = ranks[0]["stop"]
    assert message.startswith("DivergedError: iteration ") and "training.on_nonfinite=skip" in message
    steps = steps_of(folder / "stop")
    assert 1 <= len(steps) <= 3
    good = f"iter_{steps[-1]['iteration']:07d}"
    assert f"iteration {steps[-1]['iteration'] + 1}" in message
    assert [path.name for path in (folder / "stop/checkpoints").iterdir()] == [good]
    assert json.loads((folder / "stop/status.json").read_text())["state"] == "failed"


def test_a_run_that_only_skips_ends_too(folder: Path, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["skip"] == ranks[1]["skip"]
    assert "3 steps before it were skipped" in ranks[0]["skip"]
    lines = steps_of(folder / "skip")
    assert lines[-1]["optim/skipped_steps"] == 3.0 and "optim/grad_norm" not in lines[-1]
    progress = json.loads((folder / f"skip/checkpoints/iter_{lines[-1]['iteration']:07d}/progress.json").read_text())
    assert (progress["skipped_steps"], progress["skipped_in_a_row"]) == (3, 3)
