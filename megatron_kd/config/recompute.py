"""Rules for the activations that the backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.model import ModelConfig

if TYPE_CHECKING:
    from megatron_kd.config.training import TrainingConfig

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"]
"""Those of Megatron-Core's names that one of our families has."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_modules": ["core_attn"]},
}
_BELONGS_TO = {key: granularity for granularity, keys in _DEFAULTS.items() for key in keys}
WITH_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
"""Modules whose outputs Megatron-Core drops and makes again, for which it asks Transformer Engine."""
RECOMPUTE_KEYS = ("recompute_granularity", *_BELONGS_TO)
"""The keys of ``training`` that Megatron-Core's ``TransformerConfig`` has under the same names."""


def with_recompute_defaults(training: Mapping[str, Any]) -> dict[str, Any]:
    """The section with what its granularity needs and leaves out."""
    defaults = _DEFAULTS.get(str(training.get("recompute_granularity")), {})
    return {**training, **{key: value for key, value in defaults.items() if training.get(key) is None}}


def recompute_problems(
    training: TrainingConfig, cluster: ClusterConfig, parallelism: ParallelismConfig, student: ModelConfig
) -> Iterator[str]:
    """What is wrong between the keys of recomputation, and between them and the student."""
    granularity = training.recompute_granularity
    for key, needed in _BELONGS_TO.items():
        if getattr(training, key) is not None and granularity != needed:
            yield (
                f"training.{key} belongs to training.recompute_granularity {needed}, which is {granularity or 'null'}: "
                f"set {key} to null or recompute_granularity to {needed}"
            )
    layers = student.num_layers // (parallelism.pipeline_model_parallel_size * parallelism.chunks)
    number = training.recompute_num_layers
    if granularity == "full" and number is not None and number > layers:
        yield (
            f"training.recompute_num_layers {number} is more than the {layers} layers of student.model "
            f"({student.name}) on a pipeline stage{' in one chunk' if parallelism.chunks > 1 else ''}: lower it"
        )
    if granularity == "selective":
        yield from _module_problems(training.recompute_modules or [], cluster, student)


def _module_problems(modules: list[RecomputeModule], cluster: ClusterConfig, student: ModelConfig) -> Iterator[str]:
    if len(set(modules)) < len(modules):
        yield f"training.recompute_modules {modules} holds a name twice: remove one"
    experts = student.num_moe_experts is not None
    missing = [name for name in modules if name in (("mlp",) if experts else ("moe", "moe_act"))]
    if missing:
        has = "experts in every layer" if experts else "no experts"
        yield (
            f"training.recompute_modules names {' and '.join(missing)}, but student.model ({student.name}) has {has}: "
            f"{'use moe' if experts else 'use mlp'}, or remove it"
        )
    of_engine = [name for name in modules if name in WITH_TRANSFORMER_ENGINE and name not in missing]
    if of_engine and cluster.gpu == "cpu":
        yield (
            f"training.recompute_modules names {' and '.join(of_engine)}, for which Megatron-Core needs Transformer "
            "Engine, on a GPU: remove it"
        )
