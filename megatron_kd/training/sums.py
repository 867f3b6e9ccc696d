"""Sums over tokens, so that means are exact whatever rank and micro batch a token fell into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.data.batches import Batch
from megatron_kd.losses import DivergenceOutput, to_device
from megatron_kd.models.parallel import ParallelGroups

FIELDS = (
    "total",
    "kd",
    "ce",
    "teacher_mass",
    "student_mass",
    "tail",
    "top1_agreement",
    "tokens",
    "labelled",
    "forward_kl",
)


@dataclass(frozen=True)
class TokenSums:
    """One float64 vector of ``FIELDS``, summed over unmasked tokens; ``labelled`` counts those with a label."""

    values: Tensor

    @staticmethod
    def of(output: DivergenceOutput, batch: Batch, ce_weight: float, forward_kl: Tensor | None = None) -> TokenSums:
        """The sums of one micro batch. The host reads nothing but the batch's own tensors in CPU memory.

        Args:
            forward_kl: [N], what evaluation measures beside the recipe's divergence.
        """
        s, device = output.statistics, output.loss_per_token.device
        unmasked = batch.token_weights != 0
        labelled = int((unmasked & (batch.labels >= 0)).sum()) if ce_weight > 0 else 0
        valid = to_device(unmasked, device)

        def number(value: int) -> Tensor:
            return torch.full((), value, dtype=torch.float64, device=device)

        def total(per_token: Tensor | None) -> Tensor:
            # Masked rows hold 0, but a mask times garbage would not be 0: select, do not multiply.
            if per_token is None:
                return number(0)
            return torch.where(valid, per_token.to(torch.float64), 0.0).sum()

        kd = s.kd_per_token if s.kd_per_token is not None else output.loss_per_token
        return TokenSums(
            torch.stack(
                [
                    total(output.loss_per_token),
                    total(kd),
                    total(s.ce_per_token),
                    total(s.teacher_mass),
                    total(s.student_mass),
                    total(s.tail),
                    total(s.top1_agreement),
                    number(int(unmasked.sum())),
                    number(labelled),
                    total(forward_kl),
                ]
            )
        )

    @staticmethod
    def reduce(parts: Iterable[Tensor], groups: ParallelGroups | None, device: torch.device) -> dict[str, float]:
        """Adds up micro batches and all ranks that have some; every rank gets the same. Collective.

        Args:
            parts: ``values`` of micro batches; none on the stages before the last.
            groups: None: this rank alone.
        """
        vector = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)
        for part in parts:
            vector += part
        if groups is not None:
            add_over_model(vector, groups)
        return dict(zip(FIELDS, vector.tolist(), strict=True))


def add_over_model(sums: Tensor, groups: ParallelGroups) -> None:
    """Adds, in place, what the last stages of all data-parallel ranks have. Others bring zeros. Collective."""
    dist.all_reduce(sums, group=groups.dp_group)
    if groups.pp_size > 1:
        dist.all_reduce(sums, group=groups.pp_group)


def means(sums: dict[str, float]) -> dict[str, float]:
    """Means per unmasked token under the metric names of the house; absent where nothing was counted."""
    tokens = sums["tokens"]
    if tokens == 0:
        return {}
    named = {
        "loss/total": sums["total"],
        "loss/kd": sums["kd"],
        "kd/teacher_mass": sums["teacher_mass"],
        "kd/student_mass": sums["student_mass"],
        "kd/tail": sums["tail"],
        "kd/top1_agreement": sums["top1_agreement"],
    }
    result = {name: value / tokens for name, value in named.items()}
    if sums["labelled"] > 0:
        result["loss/ce"] = sums["ce"] / sums["labelled"]
    return result
