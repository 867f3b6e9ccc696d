"""One training step: micro batches through Megatron-Core's schedule, then the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.device import current_device, lost_ranks_reported, synchronize
from megatron_kd.errors import DivergedError
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.training.distill import Distillation
from megatron_kd.training.setup import Student
from megatron_kd.training.sums import TokenSums, means


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all ranks; the same on every one.

    Attributes:
        metrics: means per token, gradient norm and learning rate, under their public names.
        tokens: unmasked tokens of the global batch.
    """

    metrics: dict[str, float]
    tokens: int


@lost_ranks_reported()
def train_step(
    recipe: Recipe, student: Student, distillation: Distillation, groups: ParallelGroups, batches: list[Batch]
) -> StepResult:
    """One optimizer step on this rank's micro batches. Collective over all ranks.

    The loss is the sum over tokens; gradients are summed over micro batches and ranks and divided once by the
    unmasked tokens of the global batch, so that they do not depend on how the tokens are spread.

    Raises:
        DivergedError: the gradient is not finite; on every rank.
        RemoteRankError: another rank died.
    """

    student.model.zero_grad_buffer()
    student.optimizer.zero_grad()
    sums = distillation.run(student.model, batches, seq_length=recipe.data.seq_length, forward_only=False)
    lr = student.optimizer.param_groups[0]["lr"]
    updated, grad_norm, _ = student.optimizer.step()
    if grad_norm is not None and not math.isfinite(grad_norm):
        # The norm is of the whole model, so every rank sees it and stops here.
        raise DivergedError(
            f"the gradient of iteration {student.iteration + 1} has the norm {float(grad_norm)}: the weights are lost, "
            "a checkpoint from before is good; lower optimizer.lr, or look at the rows of that iteration"
        )
    if updated:
        student.scheduler.step(increment=recipe.training.global_batch_size)
    totals = TokenSums.reduce(sums, groups, current_device())
    synchronize()
    metrics = means(totals)
    metrics["optim/lr"] = float(lr)
    if grad_norm is not None:
        metrics["optim/grad_norm"] = float(grad_norm)
    return StepResult(metrics, int(totals["tokens"]))
