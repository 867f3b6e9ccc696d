"""Checkpoints from the inside: what is restored, what damage is found, and that the recipe's settings win."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.errors import CheckpointError
from megatron_kd.testing import run_distributed
from megatron_kd.training.checkpoint import list_checkpoints
from tests.assets import tiny_recipe
from tests.training_runs import Layout, Trainer, largest_difference, make_inputs, recipe_in

ALONE = Layout(1)
BEFORE, AFTER = 6, 6


def _state(trainer: Trainer) -> dict[str, Any]:
    """Weights, moments and steps of the optimizer, in the order of its parameters."""
    groups = trainer.student.optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    inner = trainer.student.optimizer.chained_optimizers[0].optimizer
    return {
        "weights": [p.detach().clone() for p in trainer.student.model.module.parameters()],
        "masters": [p.detach().clone() for p in parameters],
        "exp_avg": [inner.state[p]["exp_avg"].clone() for p in parameters],
        "exp_avg_sq": [inner.state[p]["exp_avg_sq"].clone() for p in parameters],
        "step": [group["step"] for group in groups if group["params"]],
    }


def _save(trainer: Trainer, run_dir: Path) -> Path:
    from megatron_kd.training.checkpoint import save_checkpoint

    return save_checkpoint(trainer.student, trainer.recipe.student.model, trainer.session.groups, run_dir, keep=9)


def _load(trainer: Trainer, path: Path) -> None:
    from megatron_kd.training.checkpoint import load_checkpoint

    load_checkpoint(trainer.student, trainer.recipe.student.model, trainer.session.groups, path)


def _damages(recipe: Path, path: Path, folder: Path) -> dict[str, str]:
    """What is said when each file of a checkpoint is missing, cut in half or empty."""
    said = {}
    trainer = Trainer(recipe_in(recipe, ALONE))
    for name in sorted(file.name for file in path.iterdir()):
        for how in ("missing", "halved", "empty"):
            broken = shutil.copytree(path, folder / f"{how}_{name}")
            data = (broken / name).read_bytes()
            (broken / name).unlink()
            if how != "missing":
                (broken / name).write_bytes(data[: len(data) // 2] if how == "halved" else b"")
            try:
                _load(trainer, broken)
                said[f"{name} {how}"] = "loaded"
            except CheckpointError as error:
                said[f"{name} {how}"] = str(error)
            except Exception as error:
                said[f"{name} {how}"] = f"not ours: {type(error).__name__} {error}"
    return said


def _rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    make_inputs(recipe_in(recipe, ALONE))
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        straight = Trainer(recipe_in(recipe, ALONE, f"training.precision={precision}"))
        straight.curve(BEFORE)
        path = _save(straight, folder / precision)
        found[precision] = {"saved": _state(straight), "random": torch.random.get_rng_state()}
        found[precision]["straight"] = straight.curve(AFTER)
        torch.manual_seed(99)
        again = Trainer(recipe_in(recipe, ALONE, f"training.precision={precision}"))
        _load(again, path)
        found[precision] |= {"loaded": _state(again), "random again": torch.random.get_rng_state()}
        found[precision]["resumed"] = again.curve(AFTER)
    path = folder / "fp32" / "checkpoints" / f"iter_{BEFORE:07d}"
    forgetful = Trainer(recipe_in(recipe, ALONE))
    _load(forgetful, path)
    for moments in forgetful.student.optimizer.chained_optimizers[0].optimizer.state.values():
        moments["exp_avg"].zero_()
    found["without moments"] = forgetful.curve(AFTER)
    changed = ["optimizer.lr=4e-3", "optimizer.adam_beta1=0.5", "training.train_iters=40", "optimizer.weight_decay=0.3"]
    other = Trainer(recipe_in(recipe, ALONE, *changed))
    _load(other, path)
    other.step()
    (group, *_) = [g for g in other.student.optimizer.param_groups if g["params"] and g["weight_decay"] > 0]
    found["changed"] = {
        "lr": [s["optim/lr"] for s in other.curve(3)],
        **{k: group[k] for k in ("betas", "weight_decay")},
    }
    found["damages"] = _damages(recipe, path, folder)
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_distributed(_rank, 1, recipe, recipe.parent)[0]
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_state_comes_back_bit_by_bit(found: dict[str, Any], precision: str) -> None:
    saved, loaded = found[precision]["saved"], found[precision]["loaded"]
    assert saved["step"] == loaded["step"] == [BEFORE] * len(saved["step"])
    for name in ("weights", "masters", "exp_avg", "exp_avg_sq"):
        assert len(saved[name]) >= 15
        assert all(torch.equal(a, b) for a, b in zip(saved[name], loaded[name], strict=True)), name
    assert any(moment.abs().max() > 0 for moment in loaded["exp_avg"])
    assert torch.equal(found[precision]["random"], found[precision]["random again"])
    assert found[precision]["resumed"] == found[precision]["straight"]


def test_moments_matter(found: dict[str, Any]) -> None:
    """What a resume that lost them would look like: the comparison of curves does notice."""
    assert largest_difference(found["fp32"]["straight"][1:], found["without moments"][1:]) > 1e-3


def test_a_resumed_run_follows_its_recipe(found: dict[str, Any]) -> None:
    """The learning rate of iterations 7, 8, 9 of the new schedule: warm-up 2, cosine from 4e-3 to 1e-4 over 40."""
    expected = [1e-4 + 3.9e-3 * 0.5 * (1 + math.cos(math.pi * (i - 2) / 38)) for i in (7, 8, 9)]
    assert found["changed"]["lr"] == pytest.approx(expected, rel=1e-12)
    assert found["changed"]["betas"] == (0.5, 0.95)
    assert found["changed"]["weight_decay"] == 0.3


def test_damage_is_named(found: dict[str, Any]) -> None:
    assert len(found["damages"]) >= 15
    for damage, said in found["damages"].items():
        name, how = damage.rsplit(" ", 1)
        assert f"{how}_{name}" in said and "not ours" not in said and "\n" not in said, f"{damage}: {said}"


def test_half_done_directories_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("iter_0000004", ".iter_0000008.partial", ".iter_0000002.removed", "iter_12.partial", "iter_0000010x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [iteration for iteration, _ in list_checkpoints(tmp_path)] == [4]
