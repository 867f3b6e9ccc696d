"""A search for the layout: every one that the recipe's own rules allow, on the fewest nodes, fastest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_kd.config import ParallelismConfig, Recipe, TrainingConfig
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.plan import Plan, describe_layout, plan_recipe

NODES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Tensor, pipeline and context parallel sizes that are tried."""
EXPERT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS_MIB = (None, 512.0)


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        overrides: what to put behind the recipe on the command line.
    """

    plan: Plan
    overrides: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        recipe = self.plan.recipe
        return {
            "overrides": self.overrides,
            "nodes": recipe.cluster.nodes,
            "layout": describe_layout(Layout.of(recipe)),
            "recompute_granularity": recipe.training.recompute_granularity,
            "total_gib": self.plan.memory.total / GIB,
            "step_time_s": self.plan.step.seconds,
            "tflops_per_gpu": self.plan.step.tflops_per_gpu,
        }


def suggest(recipe: Recipe, nodes: tuple[int, ...] = NODES) -> list[Suggestion]:
    """All layouts that fit on the smallest of these node counts that has any, fastest first; nothing where none has."""
    for count in nodes:
        fitting = _without_needless_chunks(
            [plan for plan in map(plan_recipe, candidates(recipe, count)) if plan.memory.fits]
        )
        if fitting:
            # Of equally fast layouts the one with the smaller groups comes first, then the emptier one.
            fitting.sort(key=lambda plan: (round(plan.step.seconds, 4), _complexity(plan.recipe), plan.memory.total))
            return [Suggestion(plan, overrides_between(recipe, plan.recipe)) for plan in fitting]
    return []


def candidates(recipe: Recipe, nodes: int) -> Iterator[Recipe]:
    """The recipe in every layout that its own rules allow on so many nodes; its batch and models stay."""
    cluster = recipe.cluster.model_copy(update={"nodes": nodes})
    models = {"teacher.model": recipe.teacher.model, "student.model": recipe.student.model}
    own = recipe.teacher.parallelism
    if own is not None:
        # The teacher keeps its own layout; where that does not go with so many nodes, no layout does.
        if any(own.problems(cluster, recipe.data.seq_length, {"teacher.model": recipe.teacher.model})):
            return
        del models["teacher.model"]
    experts = EXPERT_SIZES if any(model.num_moe_experts for model in models.values()) else (1,)
    chunks = CHUNKS_MIB if recipe.loss.implementation != "dense" else (recipe.loss.chunk_mib,)
    for tp, pp, cp, ep in product(SIZES, SIZES, SIZES, experts):
        # Tensor parallelism over the network is never worth it.
        if tp > cluster.gpus_per_node or tp * pp * cp > cluster.world_size:
            continue
        layout = ParallelismConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            sequence_parallel=tp > 1,
        )
        if any(layout.problems(cluster, recipe.data.seq_length, models)):
            continue
        for training in _recomputations(recipe):
            if any(training.problems(cluster, layout, recipe.student.model)):
                continue
            for chunk in chunks:
                loss = recipe.loss.model_copy(update={"chunk_mib": chunk})
                yield recipe.model_copy(
                    update={"cluster": cluster, "parallelism": layout, "training": training, "loss": loss}
                )


def _recomputations(recipe: Recipe) -> Iterator[TrainingConfig]:
    """Nothing, the widest activations of every layer, or whole layers."""
    module = "mlp" if recipe.student.model.num_moe_experts is None else "moe_act"
    settings: tuple[tuple[Any, Any, Any, Any], ...] = (
        (None, None, None, None),
        ("selective", None, None, [module]),
        ("full", "uniform", 1, None),
    )
    if recipe.cluster.gpu == "cpu":  # moe_act needs Transformer Engine
        settings = settings[::2]
    keys = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    for values in settings:
        yield recipe.training.model_copy(update=dict(zip(keys, values, strict=True)))


def _without_needless_chunks(plans: list[Plan]) -> list[Plan]:
    """Smaller chunks only where the default ones do not fit."""
    kept: dict[str, Plan] = {}
    for plan in plans:  # the default comes first
        recipe = plan.recipe
        kept.setdefault(f"{recipe.parallelism!r} {recipe.training!r}", plan)
    return list(kept.values())


def _complexity(recipe: Recipe) -> tuple[int, int, int, bool]:
    sizes = recipe.parallelism
    return (
        sizes.pipeline_model_parallel_size,
        sizes.context_parallel_size,
        sizes.tensor_model_parallel_size,
        recipe.loss.chunk_mib is not None,
    )


_KEYS = {
    "cluster": ("nodes",),
    "parallelism": (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ),
    "training": (
        "micro_batch_size",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    ),
    "loss": ("implementation", "chunk_mib"),
    "teacher": ("mode", "targets", "cache", "offload"),
}


def overrides_between(recipe: Recipe, other: Recipe) -> list[str]:
    """The ``key=value`` words that make the other recipe out of this one, as far as a search changes it."""
    words = []
    for section, keys in _KEYS.items():
        for key in keys:
            before, after = getattr(getattr(recipe, section), key), getattr(getattr(other, section), key)
            if before != after:
                words.append(f"{section}.{key}={_word(after)}")
    return words


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
