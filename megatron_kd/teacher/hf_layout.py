"""How an engine on ``teacher.model.hf`` is laid out: whole on each rank, or over a node's GPUs for one rank."""

from __future__ import annotations

from megatron_kd.config import Recipe
from megatron_kd.errors import ConfigError


def check_layout(recipe: Recipe, *, sources: str, spread: str, value: object, alone: object) -> None:
    """Raises ConfigError where the recipe names no model, splits it by our own parallelism, or shares a node's GPUs.

    Args:
        sources: what ``teacher.model.hf`` may name, in words.
        spread: the engine's own setting that gives one rank all GPUs of a node.
        value: that setting's.
        alone: the value with which each rank has one GPU.
    """
    engine = recipe.teacher.engine
    if recipe.teacher.model.hf is None:
        raise ConfigError(f"teacher.engine is {engine}, but teacher.model.hf is not set: name {sources}")
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        size = getattr(recipe.parallelism, f"{axis}_parallel_size")
        if size > 1:
            also = " (and sequence_parallel to false)" if recipe.parallelism.sequence_parallel else ""
            raise ConfigError(
                f"teacher.engine {engine} captures at parallelism.{axis}_parallel_size 1, not {size}: capture "
                f"with it set to 1{also}, the cache serves every layout; the teacher is spread over GPUs by {spread}"
            )
    gpus = recipe.cluster.gpus_per_node
    if value != alone and gpus > 1:
        raise ConfigError(
            f"{spread} {value!r} takes all GPUs of a node for one rank, but cluster.gpus_per_node is {gpus}: set it to "
            f"1, or {spread.rpartition('.')[2]} to {'null' if alone is None else alone}"
        )
