"""A checkpoint on a GPU whose files are written after the student was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.training_runs import Layout, Trainer, make_inputs, recipe_in


def _rank(rank: int, world: int, recipe: Path) -> dict[str, bool]:
    from megatron_kd.training.checkpoint import BegunCheckpoint, load_checkpoint

    make_inputs(recipe_in(recipe, Layout(1)))
    trainer = Trainer(recipe_in(recipe, Layout(1)))
    trainer.step()
    student, model, groups = trainer.student, trainer.recipe.student.model, trainer.session.groups
    parameters = list(student.model.module.parameters())
    saved = [parameter.detach().clone() for parameter in parameters]
    begun = BegunCheckpoint(student, model, groups, recipe.parent / "run", detached=True)
    trainer.step()
    moved = not all(torch.equal(a, b) for a, b in zip(saved, parameters, strict=True))
    begun.write()
    begun.publish(keep=1)
    load_checkpoint(student, model, groups, begun.path)
    return {"moved": moved, "same": all(torch.equal(a, b) for a, b in zip(saved, parameters, strict=True))}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_is_what_was_saved(tmp_path: Path, precision: str) -> None:
    recipe = tiny_recipe(tmp_path, cluster={"gpu": "h200"}, training={"precision": precision})
    (found,) = run_distributed(_rank, 1, recipe, backend="nccl")
    assert found == {"moved": True, "same": True}
