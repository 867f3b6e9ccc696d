"""A recipe's plan: memory, time, cache and GPU-hours in one record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_kd.config import Recipe
from megatron_kd.planning.cache_size import CacheSize, plan_cache
from megatron_kd.planning.efficiency import GIB, USABLE
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.memory import Memory, plan_memory
from megatron_kd.planning.parameters import rank_parameters, whole_model
from megatron_kd.planning.step_time import StepTime, capture_seconds, plan_step
from megatron_kd.planning.teacher import has_own_layout, teacher_layout


@dataclass(frozen=True)
class Plan:
    """What a recipe will take."""

    recipe: Recipe
    memory: Memory
    step: StepTime
    cache: CacheSize

    @property
    def train_hours(self) -> float:
        """GPU-hours of all steps."""
        return self.step.seconds * self.recipe.training.train_iters * self.recipe.world_size / 3600

    @property
    def capture_hours(self) -> float:
        """GPU-hours to capture the cache once, on the recipe's own ranks."""
        return capture_seconds(self.recipe, self.cache.tokens) * self.recipe.world_size / 3600

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``; GiB of 2^30 bytes."""
        memory, step, recipe = self.memory, self.step, self.recipe
        limit = None if math.isinf(memory.limit) else memory.limit / GIB
        layout, taught_in = Layout.of(recipe), teacher_layout(recipe)
        teacher_ranks = [rank_parameters(recipe.teacher.model, taught_in, s).total for s in range(taught_in.pp)]
        return {
            "recipe": recipe.name,
            "parameters": {
                role: whole_model(model)
                for role, model in (("teacher", recipe.teacher.model), ("student", recipe.student.model))
            },
            "parameters_per_rank": {
                "student": max(rank_parameters(recipe.student.model, layout, s).total for s in range(layout.pp)),
                "teacher": max(teacher_ranks),
            },
            "layout": describe_layout(layout),
            "teacher_layout": describe_layout(taught_in) if has_own_layout(recipe) else None,
            "memory": {
                "gpu": recipe.cluster.gpu,
                "gpu_gib": None if limit is None else limit / USABLE,
                "limit_gib": limit,
                "total_gib": memory.total / GIB,
                "fits": memory.fits,
                "parts_gib": {name: size / GIB for name, size in memory.parts.items()},
                "host": {
                    "cache_prefetch_gib": memory.host_prefetch / GIB,
                    "teacher_gib": memory.host_teacher / GIB,
                    "optimizer_gib": memory.host_optimizer / GIB,
                },
                "worst_stage": memory.stage,
                "moment": memory.moment,
            },
            "time": {
                "step_time_s": step.seconds,
                "tflops_per_gpu": step.tflops_per_gpu,
                "mfu": step.mfu,
                "hfu": step.hfu,
                "tokens_per_s": step.tokens_per_s,
                "parts_s": dict(step.parts),
                "student_flops": step.student_flops,
                "executed_flops": step.executed_flops,
                "loss_flops": step.loss_flops,
            },
            "cache": {
                "tokens": self.cache.tokens,
                "bytes": self.cache.bytes,
                "bytes_per_token": self.cache.bytes_per_token,
                "read_bytes_per_s": self.cache.bytes_per_token * step.tokens_per_s,
            },
            "gpu_hours": {"train": self.train_hours, "capture": self.capture_hours},
        }


def plan_recipe(recipe: Recipe) -> Plan:
    """The plan of a checked recipe."""
    return Plan(recipe, plan_memory(recipe), plan_step(recipe), plan_cache(recipe))


def describe_layout(layout: Layout) -> dict[str, Any]:
    """The sizes of a layout under short names."""
    return {
        "world": layout.world,
        "tp": layout.tp,
        "sp": layout.sequence_parallel,
        "pp": layout.pp,
        "vp": layout.vp,
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": layout.dp,
        "microbatches": layout.microbatches,
    }
