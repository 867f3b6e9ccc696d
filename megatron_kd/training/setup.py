"""The student with everything that trains it: DDP, distributed optimizer, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_kd.config import Recipe
from megatron_kd.models.build import build_chunks
from megatron_kd.models.checkpoint import load_weights
from megatron_kd.models.chunks import as_model, chunks_of
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.transformer_config import params_dtype
from megatron_kd.training.from_teacher import load_from_teacher
from megatron_kd.training.guard import Guard
from megatron_kd.training.guarded_optimizer import GuardedOptimizer
from megatron_kd.training.phases import Phases


@dataclass
class Student:
    """What a training step changes, and how far it has come.

    Attributes:
        chunks: what this rank holds of the model: one, and several where stages are interleaved.
        iteration: steps done, those that were skipped included.
        consumed_samples: rows drawn since the beginning.
        tokens: unmasked tokens of these steps.
        guard: what decides which steps are skipped.
        phases: what this rank is doing with it.
    """

    chunks: list[DistributedDataParallel]
    optimizer: GuardedOptimizer
    scheduler: OptimizerParamScheduler
    iteration: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    guard: Guard = field(default_factory=Guard)
    phases: Phases = field(default_factory=Phases)

    @cached_property
    def wrapped(self) -> torch.nn.Module:
        """What a training step runs: the DDP, or ``Chunks`` of them."""
        model: torch.nn.Module = as_model(self.chunks)
        return model

    @cached_property
    def bare(self) -> torch.nn.Module:
        """The model itself, or ``Chunks`` of it."""
        model: torch.nn.Module = as_model([chunk.module for chunk in self.chunks])
        return model

    @property
    def model(self) -> DistributedDataParallel:
        """The only chunk, where stages are not interleaved."""
        (only,) = self.chunks
        return only


def build_student(recipe: Recipe, groups: ParallelGroups, *, with_weights: bool = True) -> torch.nn.Module:
    """The student as the recipe starts it: cut from the teacher, from a checkpoint, or random. Collective.

    Args:
        with_weights: False where a training checkpoint is loaded next.

    Returns:
        A GPTModel, or ``Chunks`` of it where stages are interleaved.

    Raises:
        ConfigError, CheckpointError, DataError: no weights to start from, or of another model.
    """
    student = recipe.student
    built = build_chunks(student.model, recipe.parallelism, groups, recipe.training.precision, training=recipe.training)
    if not with_weights:
        return built
    if student.from_teacher is not None:
        load_from_teacher(built, recipe, groups)
    elif student.checkpoint is not None:
        load_weights(built, student.model, Path(student.checkpoint))
    return built


def wrap_for_training(
    recipe: Recipe, groups: ParallelGroups, built: torch.nn.Module, phases: Phases | None = None
) -> Student:
    """Adds Megatron-Core's DDP, distributed optimizer and schedule to a model. Collective.

    Gradients are reduced in float32 and summed, not averaged: the schedule divides by tokens. The schedule counts
    samples, as Megatron's own does, so that it does not depend on the batch size.
    """
    config = chunks_of(built)[0].config
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            module=chunk,
            pg_collection=groups.collection,
        )
        for chunk in chunks_of(built)
    ]
    settings = recipe.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=recipe.training.precision == "bf16",
            params_dtype=params_dtype(recipe.training.precision),
            use_distributed_optimizer=True,
            # Its gradients come the way of the precision-aware optimizer, as Megatron-LM demands of the two together.
            optimizer_cpu_offload=settings.optimizer_cpu_offload,
            use_precision_aware_optimizer=settings.optimizer_cpu_offload,
            optimizer_offload_fraction=settings.optimizer_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=settings.optimizer_cpu_offload,
        ),
        chunks,
    )
    batch = recipe.training.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters * batch,
        lr_decay_steps=(settings.lr_decay_iters or recipe.training.train_iters) * batch,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run follows its recipe, not the settings it was begun with.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    config.timers = None
    student = Student(chunks, GuardedOptimizer(optimizer), scheduler, phases=phases or Phases())
    config.finalize_model_grads_func = _in_phase(student, finalize_model_grads)
    return student


def _in_phase(student: Student, reduce: Callable[..., None]) -> Callable[..., None]:
    """The reduction of gradients, at the end of Megatron-Core's schedule, as a phase of its own."""

    def reduce_in_phase(*arguments: Any, **named: Any) -> None:
        with student.phases("gradients"):
            reduce(*arguments, **named)

    return reduce_in_phase
