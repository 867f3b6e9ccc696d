"""Memory of the fullest rank, part by part, at the moment when it is fullest.

A pipeline stage has up to three such moments in a step: the teacher's forward pass (online), the loss of the youngest
micro batch (last stage), and the backward pass of its last layer. Weights, gradients and optimizer are there in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_kd.config import ModelConfig, Recipe
from megatron_kd.planning.activations import stage_activations
from megatron_kd.planning.device import device_of
from megatron_kd.planning.efficiency import COMMUNICATOR_GIB, CONTEXT_GIB, FRAGMENTATION, GIB, HOST_CPU_GIB, USABLE
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.loss_workspace import LossShape, loss_workspace, resolved_mode, target_bytes
from megatron_kd.planning.parameters import Parameters, rank_parameters
from megatron_kd.planning.recomputation import Recomputation
from megatron_kd.planning.teacher import has_own_layout, teacher_layout, teacher_memory

HOST_OPTIMIZER = 16
"""Bytes of an offloaded parameter in the host's memory: float32 copy, gradient and two moments."""
PARTS = ("weights", "gradients", "optimizer", "activations", "loss_workspace", "teacher", "reserve")


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank of one stage.

    Attributes:
        moment: ``teacher``, ``loss`` or ``backward``.
        parts: by the names of ``PARTS``.
        limit: what may be filled of the device; infinite on a CPU.
        host_prefetch: targets that are read ahead, in the host's memory for each rank.
        host_teacher: weights of an offloaded teacher there, for each rank.
        host_optimizer: what ``optimizer.optimizer_cpu_offload`` moves there, for each rank.
    """

    stage: int
    moment: str
    parts: dict[str, float]
    limit: float
    host_prefetch: float
    host_teacher: float = 0.0
    host_optimizer: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.total <= self.limit


def plan_memory(recipe: Recipe) -> Memory:
    """The fullest moment of the fullest stage."""
    return max(moments(recipe), key=lambda moment: moment.total)


def moments(recipe: Recipe) -> Iterator[Memory]:
    """All moments of all stages."""
    layout, recomputation = Layout.of(recipe), Recomputation.of(recipe)
    model = recipe.student.model
    shape = LossShape.of(recipe, layout)
    workspace = loss_workspace(shape, recipe.loss.implementation, resolved_mode(recipe, shape), recipe.loss.chunk_mib)
    prefetch = _prefetch(recipe, layout, shape)
    limit = USABLE * device_of(recipe).memory_gib * GIB
    for stage in range(layout.pp):
        last = stage == layout.pp - 1
        held_here = rank_parameters(model, layout, stage)
        offloaded = recipe.optimizer.optimizer_offload_fraction if recipe.optimizer.optimizer_cpu_offload else 0.0
        static = _static(held_here, layout, offloaded)
        host_optimizer = _optimizer_shards(held_here, layout) * offloaded * HOST_OPTIMIZER
        activations = stage_activations(model, layout, recomputation, stage)
        taught = teacher_memory(recipe, layout, stage)
        largest = held_here.largest * layout.itemsize
        found = [
            (
                "backward",
                0.0 if layout.itemsize == 4 else largest,
                activations.kept + activations.backward,
                workspace.held + target_bytes(shape) if last else 0.0,
                taught.kept + taught.held,
            )
        ]
        if last:
            loss_moment = workspace.peak + target_bytes(shape)
            found.append(("loss", 0.0, activations.kept, loss_moment, taught.kept + taught.held))
        if recipe.teacher.mode == "online":
            found.append(("teacher", 0.0, 0.0, 0.0, taught.kept + taught.held + taught.passing))
        for moment, gradient, activation, loss, teaching in found:
            parts = {
                **static,
                "gradients": static["gradients"] + gradient,
                "activations": activation,
                "loss_workspace": loss,
                "teacher": teaching,
            }
            moving = gradient + activation + loss + teaching - taught.kept
            parts["reserve"] = _reserve(recipe, layout, moving)
            on_device = {name: parts[name] for name in PARTS}
            yield Memory(stage, moment, on_device, limit, prefetch, taught.host, host_optimizer)


def _static(held: Parameters, layout: Layout, offloaded: float) -> dict[str, float]:
    """Weights in DDP's buffer, float32 gradients beside them, and the optimizer's shard but for what is offloaded.

    Of bf16 weights that is a float32 copy and Adam's two moments, 12 bytes; float32 weights need no copy, 8.
    """
    state = 12 if layout.itemsize == 2 else 8
    return {
        "weights": held.buffer * layout.itemsize,
        "gradients": held.buffer * 4.0,
        "optimizer": _optimizer_shards(held, layout) * state * (1.0 - offloaded),
    }


def _optimizer_shards(held: Parameters, layout: Layout) -> float:
    """Parameters that this rank updates."""
    return held.dense_buffer / layout.dense_shards + held.experts_buffer / layout.expert_shards(held.experts > 0)


def _prefetch(recipe: Recipe, layout: Layout, shape: LossShape) -> float:
    """Micro batches ready or being read: tokens, labels, weights and targets."""
    ahead = max(recipe.data.prefetch_batches * layout.microbatches, recipe.data.num_workers)
    cached = target_bytes(shape) if recipe.teacher.mode == "offline" else 0.0
    return ahead * (layout.tokens * 20 + cached)


def _reserve(recipe: Recipe, layout: Layout, moving: float) -> float:
    if recipe.cluster.gpu == "cpu":
        return HOST_CPU_GIB * GIB
    layouts = [layout, teacher_layout(recipe)] if has_own_layout(recipe) else [layout]
    sizes = [size for each in layouts for size in (each.tp, each.cp, each.pp, each.dense_shards, each.ep)]
    groups = sum(size > 1 for size in sizes) + (layout.world > 1)
    return (CONTEXT_GIB + COMMUNICATOR_GIB * groups) * GIB + FRAGMENTATION * moving


def model_weights(model: ModelConfig, layout: Layout) -> float:
    """Bytes of the fullest rank's weights."""
    return max(rank_parameters(model, layout, stage).total for stage in range(layout.pp)) * layout.itemsize
