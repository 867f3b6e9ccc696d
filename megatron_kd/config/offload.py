"""Rules for what lies in the host's memory instead of the GPU's: activations and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.model import ModelConfig

if TYPE_CHECKING:
    from megatron_kd.config.training import OptimizerConfig, TrainingConfig

OFFLOAD_KEYS = ("cpu_offloading", "cpu_offloading_num_layers")
"""The keys of ``training`` that Megatron-Core's ``TransformerConfig`` has under the same names."""


def activation_offload_problems(
    training: TrainingConfig, cluster: ClusterConfig, parallelism: ParallelismConfig, student: ModelConfig
) -> Iterator[str]:
    """What Megatron-Core refuses of ``training.cpu_offloading``, and what its keys say of each other."""
    number = training.cpu_offloading_num_layers
    if not training.cpu_offloading:
        if number:
            yield (
                f"training.cpu_offloading_num_layers is {number}, but training.cpu_offloading is false: set both or "
                "none"
            )
        return
    if cluster.gpu == "cpu":
        yield "training.cpu_offloading needs Transformer Engine, on a GPU: set it to false on a CPU"
    if not 0 < number < student.num_layers:
        yield (
            f"training.cpu_offloading_num_layers {number} must be from 1 to {student.num_layers - 1}, one less than "
            f"student.model ({student.name}) has layers"
        )
    if parallelism.pipeline_model_parallel_size > 1:
        yield (
            "training.cpu_offloading is not for pipelines, parallelism.pipeline_model_parallel_size is "
            f"{parallelism.pipeline_model_parallel_size}: set one of them otherwise"
        )
    if training.recompute_granularity is not None:
        yield (
            "training.cpu_offloading is not for recomputed activations, training.recompute_granularity is "
            f"{training.recompute_granularity}: set it to null, or cpu_offloading to false"
        )


def optimizer_offload_problems(
    optimizer: OptimizerConfig, training: TrainingConfig, cluster: ClusterConfig
) -> Iterator[str]:
    """What is wrong with ``optimizer.optimizer_cpu_offload``."""
    if not optimizer.optimizer_cpu_offload:
        if optimizer.optimizer_offload_fraction != 1.0:
            yield (
                f"optimizer.optimizer_offload_fraction is {optimizer.optimizer_offload_fraction}, but "
                "optimizer.optimizer_cpu_offload is false: set both or none"
            )
    elif cluster.gpu == "cpu":
        yield (
            "optimizer.optimizer_cpu_offload moves what lies on a GPU, and Megatron-Core's optimizer for it fails "
            "without one: set it to false on a CPU"
        )
    elif training.precision == "fp32":
        yield (
            "optimizer.optimizer_cpu_offload is for training.precision bf16: Megatron-Core's optimizer for it takes no "
            "float32 weights; set precision to bf16, or optimizer_cpu_offload to false"
        )
