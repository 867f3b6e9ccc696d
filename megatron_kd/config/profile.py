"""A profile of a few training steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megatron_kd.config.base import Section
from megatron_kd.config.layout import ClusterConfig
from megatron_kd.config.training import NonNegative, TrainingConfig


class ProfileConfig(Section):
    """Which steps are profiled, on which ranks. Names are those of Megatron's ``--profile-*``."""

    step_start: NonNegative = 10
    """Steps done when profiling begins: the first profiled iteration is the next."""
    step_end: NonNegative = 12
    """The last profiled iteration."""
    ranks: Annotated[list[NonNegative], Field(min_length=1, default=[0])]
    """Global ranks that are profiled."""
    profiler: Literal["torch", "nsys"] = "torch"
    """torch writes a trace into the run directory; nsys marks the steps and phases for ``nsys profile
    --capture-range=cudaProfilerApi``, on GPUs alone."""
    record_shapes: bool = False
    """Keep the shapes of every operator's inputs."""
    with_stack: bool = False
    """Keep the Python stack of every operator: slow, and large."""
    profile_memory: bool = False
    """Keep what every operator allocates and frees."""

    def problems(self, cluster: ClusterConfig, training: TrainingConfig) -> Iterator[str]:
        """What is wrong between the profile and the run."""
        if self.step_end <= self.step_start:
            yield (
                f"profile.step_end {self.step_end} must be more than profile.step_start {self.step_start}: no step "
                "lies between them"
            )
        if self.step_start >= training.train_iters:
            yield (
                f"profile.step_start {self.step_start} must be less than training.train_iters {training.train_iters}: "
                "lower it, or set profile to null"
            )
        if max(self.ranks) >= cluster.world_size:
            yield (
                f"profile.ranks has {max(self.ranks)}, but the cluster has the ranks 0 to {cluster.world_size - 1}: "
                "remove it"
            )
        if self.profiler == "nsys" and cluster.gpu == "cpu":
            yield "profile.profiler 'nsys' watches GPUs, cluster.gpu is 'cpu': set profile.profiler to 'torch'"
