"""The student with everything that trains it: DDP, distributed optimizer, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_kd.config import Recipe
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import load_weights
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.transformer_config import params_dtype
from megatron_kd.training.from_teacher import load_from_teacher
from megatron_kd.training.phases import Phases


@dataclass
class Student:
    """What a training step changes, and how far it has come.

    Attributes:
        iteration: optimizer steps done.
        consumed_samples: rows drawn since the beginning.
        tokens: unmasked tokens trained on since the beginning.
        phases: what this rank is doing with it.
    """

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iteration: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    phases: Phases = field(default_factory=Phases)


def build_student(recipe: Recipe, groups: ParallelGroups, *, with_weights: bool = True) -> GPTModel:
    """The student as the recipe starts it: cut from the teacher, from a checkpoint, or random. Collective.

    Args:
        with_weights: False where a training checkpoint is loaded next.

    Raises:
        ConfigError, CheckpointError, DataError: no weights to start from, or of another model.
    """
    student = recipe.student
    built = build_model(
        student.model,
        recipe.parallelism,
        groups,
        recipe.training.precision,
        trainable=True,
        training=recipe.training,
    )
    if not with_weights:
        return built
    if student.from_teacher is not None:
        load_from_teacher(built, recipe, groups)
    elif student.checkpoint is not None:
        load_weights(built, student.model, Path(student.checkpoint))
    return built


def wrap_for_training(recipe: Recipe, groups: ParallelGroups, built: GPTModel) -> Student:
    """Adds Megatron-Core's DDP, distributed optimizer and schedule to a model. Collective.

    Gradients are reduced in float32 and summed, not averaged: the schedule divides by tokens. The schedule counts
    samples, as Megatron's own does, so that it does not depend on the batch size.
    """
    config = built.config
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        ),
        module=built,
        pg_collection=groups.collection,
    )
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
        ),
        [ddp],
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
    config.no_sync_func = ddp.no_sync
    config.timers = None
    student = Student(ddp, optimizer, scheduler)
    config.finalize_model_grads_func = _in_phase(student, finalize_model_grads)
    return student


def _in_phase(student: Student, reduce: Callable[..., None]) -> Callable[..., None]:
    """The reduction of gradients, at the end of Megatron-Core's schedule, as a phase of its own."""

    def reduce_in_phase(*arguments: Any, **named: Any) -> None:
        with student.phases("gradients"):
            reduce(*arguments, **named)

    return reduce_in_phase
