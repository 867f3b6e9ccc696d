"""The machines of a run, and how the model is spread over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, lcm
from typing import Annotated, Literal

from pydantic import Field

from megatron_kd.config.base import Section
from megatron_kd.config.model import ModelConfig, Positive

SPLIT_WIDTHS = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
"""Sizes of a model that tensor parallelism divides evenly; the vocabulary is padded instead, experts stay whole."""
SINK_FAMILIES = ("gpt_oss",)
"""Attention with sinks, which context parallelism splits along the heads."""


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
    """Ranks that share the layers, as many on each."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Chunks of the student's layers on each pipeline stage, interleaved: a smaller bubble for more messages and more
    activations; null: one. A teacher keeps whole stages."""
    context_parallel_size: Positive = 1
    """Ranks that share each sequence; they exchange keys and values in attention."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts; all of one pipeline stage, whatever rows they have."""
    expert_tensor_parallel_size: Positive = 1
    """Ranks that share each expert's matrices; only 1: Megatron-Core splits no experts that have biases."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions along the sequence."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tp·pp·cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def problems(
        self, cluster: ClusterConfig, seq_length: int, models: Mapping[str, ModelConfig], key: str = "parallelism"
    ) -> Iterator[str]:
        """What is wrong with this layout; ``models`` maps the dotted key of each model to it, ``key`` is its own."""
        if self.expert_tensor_parallel_size > 1:
            yield (
                f"{key}.expert_tensor_parallel_size {self.expert_tensor_parallel_size} is not available: "
                "Megatron-Core splits no experts that have biases, as those of GPT-OSS; set it to 1"
            )
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        if cluster.world_size % self.model_parallel_size:
            yield (
                f"the world of {cluster.world_size} ranks (cluster.nodes {cluster.nodes} × cluster.gpus_per_node "
                f"{cluster.gpus_per_node}) must be a multiple of tp·pp·cp = {tp}·{pp}·{cp} = "
                f"{self.model_parallel_size} (the rest is dp): change cluster.gpus_per_node or "
                f"{key}.tensor_model_parallel_size"
            )
        if self.sequence_parallel and tp == 1:
            yield (
                f"{key}.sequence_parallel needs {key}.tensor_model_parallel_size above 1, not 1: "
                "set sequence_parallel to false"
            )
        if self.virtual_pipeline_model_parallel_size is not None and "student.model" not in models:
            yield f"{key}.virtual_pipeline_model_parallel_size interleaves the student's stages alone: set it to null"
        yield from self._length_problems(seq_length, key)
        seen: list[dict[str, int]] = []
        for where, model in models.items():
            widths = _split_widths(model)
            if widths not in seen:  # a student cut from its teacher has the same widths: say it once
                seen.append(widths)
                yield from self._width_problems(where, model, widths, key)
            if model.num_layers % pp == 0 and where == "student.model":
                yield from self._chunk_problems(model)
            if model.num_layers % pp:
                yield (
                    f"{key}.pipeline_model_parallel_size {pp} must divide {where}.num_layers {model.num_layers} "
                    f"({model.name}): set it to one of {_divisors(model.num_layers)}"
                )
        yield from self._expert_problems(cluster, models, f"{key}.expert_model_parallel_size", key)

    @property
    def whole_stages(self) -> ParallelismConfig:
        """The same without interleaved chunks: how a teacher in the student's layout stands."""
        return self.model_copy(update={"virtual_pipeline_model_parallel_size": None})

    @property
    def chunks(self) -> int:
        """Chunks of the student on each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    def _chunk_problems(self, student: ModelConfig) -> Iterator[str]:
        pp, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        key = "parallelism.virtual_pipeline_model_parallel_size"
        if chunks is not None and pp == 1:
            yield f"{key} {chunks} needs parallelism.pipeline_model_parallel_size above 1, not 1: set it to null"
        elif chunks is not None and student.num_layers % (pp * chunks):
            layers = student.num_layers // pp
            fit = f"one of {_divisors(layers).removeprefix('1, ')} or null" if layers > 1 else "null"
            yield (
                f"parallelism.pipeline_model_parallel_size {pp} × virtual_pipeline_model_parallel_size {chunks} = "
                f"{pp * chunks} must divide student.model.num_layers {student.num_layers} ({student.name}): set the "
                f"latter to {fit}"
            )

    def _length_problems(self, seq_length: int, key: str) -> Iterator[str]:
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        chunks, slices = (2 * cp if cp > 1 else 1), (tp * cp if self.sequence_parallel else 1)
        fits = lcm(chunks, slices)
        use = f"use {max(seq_length // fits, 1) * fits}"
        if seq_length % slices:
            of = f"{key}.tensor_model_parallel_size {tp}"
            if cp > 1:
                of += f" × context_parallel_size {cp} = {slices}"
            yield f"data.seq_length {seq_length} must be a multiple of {of} with sequence_parallel: {use}"
        if seq_length % chunks:
            yield (f"data.seq_length {seq_length} must be a multiple of 2 × {key}.context_parallel_size {cp}: {use}")

    def _expert_problems(
        self, cluster: ClusterConfig, models: Mapping[str, ModelConfig], key: str, section: str
    ) -> Iterator[str]:
        ep = self.expert_model_parallel_size
        with_experts = {where: model for where, model in models.items() if model.num_moe_experts is not None}
        if ep > 1 and not with_experts:
            yield f"{key} {ep} shares experts, but {' and '.join(models)} have none: set it to 1"
        seen = set()
        for where, model in with_experts.items():
            experts = model.num_moe_experts
            if experts is not None and experts % ep and experts not in seen:
                seen.add(experts)
                yield (
                    f"{key} {ep} must divide {where}.num_moe_experts {experts} ({model.name}): set it to one of "
                    f"{_divisors(experts)}"
                )
        pp = self.pipeline_model_parallel_size
        if ep > 1 and cluster.world_size % (ep * pp):
            yield (
                f"the world of {cluster.world_size} ranks must be a multiple of ep·pp = {ep}·{pp} = {ep * pp}: change "
                f"cluster.gpus_per_node or {key}"
            )
        if "student.model" in with_experts and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            yield (
                f"student.model {with_experts['student.model'].name!r} has experts, which Megatron-Core trains with "
                f"{section}.tensor_model_parallel_size {self.tensor_model_parallel_size} only together with "
                f"sequence parallelism: set {section}.sequence_parallel to true"
            )

    def _width_problems(self, where: str, model: ModelConfig, widths: Mapping[str, int], key: str) -> Iterator[str]:
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        uneven = [f"{where}.{key} {width}" for key, width in widths.items() if width % tp]
        if uneven:
            yield (
                f"{key}.tensor_model_parallel_size {tp} must divide {' and '.join(uneven)} ({model.name}): "
                f"set it to one of {_divisors(gcd(*widths.values()))}"
            )
        if cp > 1 and model.family in SINK_FAMILIES and model.num_query_groups % (tp * cp):
            yield (
                f"{key}.tensor_model_parallel_size {tp} × context_parallel_size {cp} = {tp * cp} must divide "
                f"{where}.num_query_groups {model.num_query_groups} ({model.name}), whose attention sinks context "
                "parallelism splits along the heads: lower one of them"
            )
        if tp > model.vocab_size:
            yield f"{key}.tensor_model_parallel_size {tp} is more than {where}.vocab_size {model.vocab_size}"


def _split_widths(model: ModelConfig) -> dict[str, int]:
    """What tensor parallelism has to divide: of a model with experts not their width."""
    keys = SPLIT_WIDTHS if model.num_moe_experts is None else [key for key in SPLIT_WIDTHS if key != "ffn_hidden_size"]
    return {key: getattr(model, key) for key in keys}


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
