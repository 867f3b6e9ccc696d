"""The machines of a run, and how the model is spread over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Literal

from megatron_kd.config.base import Section
from megatron_kd.config.model import ModelConfig, Positive

SPLIT_WIDTHS = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
"""Sizes of a model that tensor parallelism divides evenly; the vocabulary is padded instead."""


class ClusterConfig(Section):
    """Where a run takes place."""

    nodes: Positive = 1
    """Machines."""
    gpus_per_node: Positive = 1
    """Ranks on each node: one a GPU, or processes on the CPU."""
    gpu: Literal["cpu", "a100", "h100", "h200", "b200", "b300", "gb200", "gb300"] = "cpu"
    """Device of each rank."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node


class ParallelismConfig(Section):
    """Megatron-Core's model-parallel sizes; the ranks they leave over are data parallel."""

    tensor_model_parallel_size: Positive = 1
    """Ranks that share every matrix."""
    pipeline_model_parallel_size: Positive = 1
    """Ranks that share the layers; above 1 not available yet."""
    context_parallel_size: Positive = 1
    """Ranks that share each sequence in attention; above 1 not available yet."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts; above 1 not available yet."""
    expert_tensor_parallel_size: Positive = 1
    """Ranks that share each expert's matrices; above 1 not available yet."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions along the sequence."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tp·pp·cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def problems(self, cluster: ClusterConfig, seq_length: int, models: Mapping[str, ModelConfig]) -> Iterator[str]:
        """What is wrong with this layout; ``models`` maps the dotted key of each model to it."""
        for axis in ("pipeline_model", "context", "expert_model", "expert_tensor"):
            key = f"{axis}_parallel_size"
            if getattr(self, key) > 1:
                yield f"parallelism.{key} {getattr(self, key)} is not available yet: set it to 1"
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        if cluster.world_size % self.model_parallel_size:
            yield (
                f"the world of {cluster.world_size} ranks (cluster.nodes {cluster.nodes} × cluster.gpus_per_node "
                f"{cluster.gpus_per_node}) must be a multiple of tp·pp·cp = {tp}·{pp}·{cp} = "
                f"{self.model_parallel_size} (the rest is dp): change cluster.gpus_per_node or "
                "parallelism.tensor_model_parallel_size"
            )
        if self.sequence_parallel and tp == 1:
            yield (
                "parallelism.sequence_parallel needs parallelism.tensor_model_parallel_size above 1, not 1: "
                "set sequence_parallel to false"
            )
        if self.sequence_parallel and seq_length % tp:
            yield (
                f"data.seq_length {seq_length} must be a multiple of parallelism.tensor_model_parallel_size {tp} "
                f"with sequence_parallel: use {max(seq_length // tp, 1) * tp}"
            )
        if cp > 1 and seq_length % (2 * cp):
            yield (
                f"data.seq_length {seq_length} must be a multiple of 2 × parallelism.context_parallel_size {cp}: "
                f"use {max(seq_length // (2 * cp), 1) * 2 * cp}"
            )
        seen: list[tuple[int, ...]] = []
        for where, model in models.items():
            widths = tuple(getattr(model, key) for key in SPLIT_WIDTHS)
            if widths not in seen:  # a student cut from its teacher has the same widths: say it once
                seen.append(widths)
                yield from self._model_problems(where, model)

    def _model_problems(self, where: str, model: ModelConfig) -> Iterator[str]:
        tp = self.tensor_model_parallel_size
        widths = {key: getattr(model, key) for key in SPLIT_WIDTHS}
        uneven = [f"{where}.{key} {width}" for key, width in widths.items() if width % tp]
        if uneven:
            common = gcd(*widths.values())
            fitting = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            yield (
                f"parallelism.tensor_model_parallel_size {tp} must divide {' and '.join(uneven)} ({model.name}): "
                f"set it to one of {fitting}"
            )
        if tp > model.vocab_size:
            yield f"parallelism.tensor_model_parallel_size {tp} is more than {where}.vocab_size {model.vocab_size}"
