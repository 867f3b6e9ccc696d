"""The device a recipe names, as the arithmetic sees it."""

from __future__ import annotations

from dataclasses import replace

from megatron_kd.config import Recipe
from megatron_kd.config.gpus import GPU, GPUS
from megatron_kd.planning.efficiency import CPU_FLOPS_PER_CORE, CPU_LINK, CPU_MEMORY_BANDWIDTH, CPU_THREADS


def device_of(recipe: Recipe) -> GPU:
    """Peaks and bandwidths of one rank. float32 training on a GPU runs at the rate of float32.

    A CPU has no limit of memory here: it is the user's machine.
    """
    if recipe.cluster.gpu == "cpu":
        peak = CPU_FLOPS_PER_CORE * (recipe.training.threads or CPU_THREADS / recipe.cluster.gpus_per_node)
        return GPU(float("inf"), peak, peak, CPU_MEMORY_BANDWIDTH, CPU_LINK, CPU_LINK, CPU_MEMORY_BANDWIDTH / 2)
    gpu = GPUS[recipe.cluster.gpu]
    return gpu if recipe.training.precision == "bf16" else replace(gpu, peak_flops=gpu.float32_flops)
