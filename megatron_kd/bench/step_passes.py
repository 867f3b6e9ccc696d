"""The steps that ``bench step`` compares, by one student and one optimizer.

b rows, s positions of this rank, N = s·b tokens sequence first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_kd.bench.inputs import make_targets
from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.device import current_device
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.schedule import run_schedule
from megatron_kd.training.distill import Distillation
from megatron_kd.training.session import as_offline
from megatron_kd.training.setup import build_student, wrap_for_training
from megatron_kd.training.step import train_step

PLAIN = "cross_entropy"
"""Megatron-Core's own: the model is given labels and returns a loss per token."""


class StepPasses:
    """A student with random weights, and micro batches of random rows with made-up targets."""

    def __init__(self, recipe: Recipe) -> None:
        """Joins the ranks and builds. Collective over all ranks."""
        self._recipe = recipe
        self.groups = join_ranks(recipe)
        self.student = wrap_for_training(recipe, self.groups, build_student(recipe, self.groups, with_weights=False))
        self._batches = [self._batch(number) for number in range(recipe.num_microbatches)]
        self._distillations: dict[str, Distillation] = {}

    @staticmethod
    def offline(recipe: Recipe, implementation: str) -> Recipe:
        """The recipe with its targets from a cache and one implementation of the loss."""
        loss = recipe.loss.model_copy(update={"implementation": implementation})
        return as_offline(recipe).model_copy(update={"loss": loss})

    def _batch(self, number: int) -> Batch:
        """The same on all ranks of a copy of the model; the chunks of a row on context-parallel ones."""
        recipe, groups = self._recipe, self.groups
        rows, length, vocab = (
            recipe.training.micro_batch_size,
            recipe.data.seq_length,
            recipe.student.model.vocab_size,
        )
        generator = torch.Generator().manual_seed(recipe.seed + groups.dp_rank * recipe.num_microbatches + number)
        drawn = torch.randint(vocab, (rows, length + 1), generator=generator)
        kept = groups.context.positions(length, torch.device("cpu")) if groups.cp_size > 1 else torch.arange(length)
        targets = make_targets(rows * len(kept), vocab, recipe.teacher.top_k, torch.device("cpu"), generator)
        batch = Batch(
            sample_ids=tuple(range(rows)),
            tokens=drawn[:, :-1][:, kept].contiguous(),
            labels=drawn[:, 1:][:, kept].t().reshape(-1),
            token_weights=torch.ones(rows * len(kept)),
            targets=targets,
            context=groups.context,
        )
        return batch.to(current_device())

    def step(self, name: str) -> None:
        """One optimizer step by ``PLAIN`` or an implementation of the loss, in the phases of the student."""
        if name == PLAIN:
            self._plain_step()
            return
        recipe = self.offline(self._recipe, name)
        if name not in self._distillations:
            self._distillations[name] = Distillation(recipe, self.groups, None)
        train_step(recipe, self.student, self._distillations[name], self.groups, self._batches)

    def _plain_step(self) -> None:
        student, phases = self.student, self.student.phases
        with phases("forward_backward"):
            for chunk in student.chunks:
                chunk.zero_grad_buffer()
            student.optimizer.zero_grad()
            run_schedule(
                student.wrapped,
                self.groups,
                self._batches,
                _forward,
                number=len(self._batches),
                seq_length=self._recipe.data.seq_length,
                micro_batch_size=self._recipe.training.micro_batch_size,
                forward_only=False,
            )
        with phases("optimizer"):
            student.optimizer.step()


def _forward(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Any]]:
    rows = batch.tokens.shape[0]
    labels = batch.labels.view(-1, rows).t().contiguous().to(batch.tokens.device)
    weights = batch.token_weights.view(-1, rows).t().to(batch.tokens.device)
    return model(batch.tokens, batch.positions, batch.documents, labels=labels), partial(_sum, weights)


def _sum(weights: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """losses [b, s] → (Σ w·l, tokens, what is reported)."""
    total = (losses.float() * weights).sum()
    return total, torch.full((), weights.numel(), dtype=torch.int, device=losses.device), total.detach()
