"""Seconds of the loss of one micro batch: projections, and the passes over logits and dW.

P = 2·N·D·Vl FLOP is one projection; docs/losses.md has their numbers by mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config.gpus import GPU
from megatron_kd.models.step_flops import PROJECTIONS
from megatron_kd.planning import efficiency
from megatron_kd.planning.loss_workspace import LossShape, LossWorkspace

FUSED_BYTES = 22
"""Passes over a logit: written, read for the sums, read and written for the gradient, rounded and read twice."""
REFERENCE_BYTES = {"dense": 200, "forward_chunked": 60}
"""The operators of autograd read and write float32 logits some fifty times, forward_chunked's copies fifteen times."""


@dataclass(frozen=True)
class LossTime:
    """FLOPs and seconds of one micro batch's loss, forward and backward."""

    flops: float
    seconds: float


def loss_time(shape: LossShape, implementation: str, mode: str, workspace: LossWorkspace, gpu: GPU) -> LossTime:
    """The loss on a rank of the last stage."""
    student = 2.0 * shape.tokens * shape.hidden * shape.shard
    teacher = 2.0 * shape.tokens * (shape.teacher_hidden or 0) * shape.shard
    logits = shape.tokens * shape.computed * (1 + shape.full)
    if implementation == "fused":
        flops = PROJECTIONS[mode] * student + (2 if mode == "recompute" else 1) * teacher
        chunks = max(shape.tokens / max(workspace.chunk, 1), 1)
        moved = FUSED_BYTES * logits + 8 * shape.rows * shape.hidden * chunks
    else:
        flops = 3 * student + teacher
        moved = REFERENCE_BYTES[implementation] * logits
    seconds = flops / (efficiency.LOSS_GEMM * gpu.peak_flops) + moved / (
        efficiency.MEMORY_BANDWIDTH * gpu.memory_bandwidth
    )
    if shape.tp > 1:
        # Hidden rows gathered and dH scattered (or summed).
        sent = 2 * shape.tokens * shape.hidden * shape.itemsize * (shape.tp - 1) / shape.tp
        seconds += sent / (efficiency.LINK * gpu.link_bandwidth) * efficiency.TENSOR_PARALLEL_EXPOSED
    return LossTime(flops, seconds)
