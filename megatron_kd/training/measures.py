"""Speed and memory of a step, over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_kd.device import current_device, peak_memory_bytes
from megatron_kd.models.flops import PEAK_FLOPS, forward_flops_per_token, training_flops_per_token
from megatron_kd.training.session import Session
from megatron_kd.training.step import StepResult


def measure(session: Session, done: StepResult, seconds: float, waited_s: float) -> dict[str, float]:
    """Adds speed and memory: the slowest rank's time, waiting for data included, the fullest rank's memory."""
    recipe = session.recipe
    most = torch.tensor([seconds, float(peak_memory_bytes()), waited_s], dtype=torch.float64, device=current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    seconds, peak, waited = most.tolist()
    positions = recipe.training.global_batch_size * recipe.data.seq_length
    flops = positions * training_flops_per_token(recipe.student.model, recipe.data.seq_length)
    if recipe.teacher.mode == "online":
        flops_with_teacher = flops + positions * forward_flops_per_token(recipe.teacher.model, recipe.data.seq_length)
    else:
        flops_with_teacher = flops
    rate = seconds * recipe.world_size
    metrics = {
        **done.metrics,
        "perf/step_time_s": seconds,
        "perf/tokens_per_s_per_gpu": positions / rate,
        "perf/tflops_per_gpu": flops / rate / 1e12,
        "perf/tflops_per_gpu_with_teacher": flops_with_teacher / rate / 1e12,
        "memory/peak_gib": peak / 2**30,
        "data/cache_wait_s": waited,
    }
    peak_flops = PEAK_FLOPS.get(recipe.cluster.gpu)
    if peak_flops is not None and recipe.training.precision == "bf16":
        metrics["perf/mfu"] = flops / rate / peak_flops
    return metrics
