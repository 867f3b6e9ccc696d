"""What a recipe that does not fit could change, one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_kd.config import Recipe
from megatron_kd.planning.plan import Plan, plan_recipe
from megatron_kd.planning.suggest import overrides_between


def remedies(recipe: Recipe) -> list[tuple[str, Plan]]:
    """Single changes of recipe keys that lower the peak, as override and plan; those that fit first, fastest first."""
    before = plan_recipe(recipe)
    found = []
    for changed in _changes(recipe):
        plan = plan_recipe(changed)
        if plan.memory.total < before.memory.total:
            found.append((" ".join(overrides_between(recipe, changed)), plan))
    return sorted(found, key=lambda pair: (not pair[1].memory.fits, pair[1].step.seconds))


def _changes(recipe: Recipe) -> Iterator[Recipe]:
    if recipe.loss.implementation != "fused":
        yield _with(recipe, "loss", implementation="fused")
    elif recipe.cluster.gpu != "cpu" and (recipe.loss.chunk_mib or 1536) > 512:
        yield _with(recipe, "loss", chunk_mib=512.0)
    if recipe.teacher.mode == "online":
        # Without a cache yet, CACHE stands for the folder of the one that is to be captured.
        cache = recipe.teacher.cache or "CACHE"
        yield _with(recipe, "teacher", mode="offline", targets="top_k", cache=cache, offload=False)
        yield _with(recipe, "teacher", offload=True)
    if recipe.training.micro_batch_size > 1:
        yield _with(recipe, "training", micro_batch_size=1)
    if recipe.training.recompute_granularity != "full":
        yield _with(
            recipe,
            "training",
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            recompute_modules=None,
        )


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})
