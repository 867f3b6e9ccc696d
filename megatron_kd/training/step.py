"""One training step: micro batches through Megatron-Core's schedule, then the optimizer, if the step is sound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.device import current_device, lost_ranks_reported, synchronize
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.training.distill import Distillation
from megatron_kd.training.guarded_optimizer import Norm
from megatron_kd.training.judge import Judge
from megatron_kd.training.setup import Student
from megatron_kd.training.sums import FIELDS, means, named_sums, total_sums


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks; the same on every one.

    Attributes:
        metrics: means per token, gradient norm, learning rate and steps skipped so far, under their public names; of
            a skipped step only those that are finite.
        tokens: unmasked tokens of the global batch.
    """

    metrics: dict[str, float]
    tokens: int


@lost_ranks_reported()
def train_step(
    recipe: Recipe, student: Student, distillation: Distillation, groups: ParallelGroups, batches: list[Batch]
) -> StepResult:
    """One optimizer step on this rank's micro batches, in the phases of the student. Collective over all ranks.

    The loss is the sum over tokens; gradients are summed over micro batches and ranks and divided once by the
    unmasked tokens of the global batch, so that they do not depend on how the tokens are spread.

    The host waits for the device twice: before the update, for the sums of the loss and the gradient's norm in one
    read, and at the end. A step that is not sound leaves weights, moments and the optimizer's own step as they were;
    the learning rate goes on, since it belongs to the iteration and not to the updates.

    Raises:
        DivergedError: the step is not sound and the run ends for it; on every rank.
        RemoteRankError: another rank died.
    """
    phases = student.phases
    phases.iteration = student.iteration + 1
    with phases("forward_backward"):
        for chunk in student.chunks:
            chunk.zero_grad_buffer()
        student.optimizer.zero_grad()
        parts = distillation.run(
            student.wrapped,
            batches,
            seq_length=recipe.data.seq_length,
            forward_only=False,
            on_micro_batch=phases.beat,
            phases=phases,
        )
    lr = student.optimizer.param_groups[0]["lr"]
    with phases("optimizer"):
        reduced = _alike(total_sums(parts, groups, current_device()), groups)
        judge = Judge(recipe, student, parts, batches)
        totals: dict[str, float] = {}
        norm = math.nan

        def allow(found: Norm) -> bool:
            nonlocal norm
            *values, norm = _read(reduced, found)
            totals.update(named_sums(values))
            return judge.allows(totals, norm)

        student.optimizer.step_if(allow)
        student.scheduler.step(increment=recipe.training.global_batch_size)
        synchronize()
    metrics = {**means(totals), "optim/grad_norm": norm}
    if judge.skipped:
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    metrics |= {"optim/lr": float(lr), "optim/skipped_steps": float(student.guard.skipped_steps)}
    return StepResult(metrics, int(totals["tokens"]))


def _alike(sums: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """The sums as the first tensor-parallel rank has them: of what follows from them all ranks must think alike."""
    if groups.tp_group is not None:
        dist.broadcast(sums, group=groups.tp_group, group_src=0)
    return sums


def _read(sums: torch.Tensor, norm: Norm) -> list[float]:
    """The sums and the norm in one transfer from the device."""
    if not isinstance(norm, torch.Tensor):
        return [*sums.tolist(), float(norm)]
    values: list[float] = torch.cat([sums, norm.reshape(1).to(sums.dtype)]).tolist()
    assert len(values) == len(FIELDS) + 1
    return values
