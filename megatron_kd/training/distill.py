"""Where distillation meets Megatron-Core: the ``output_processor`` that turns hidden states into the loss.

b rows, s positions, N = s·b tokens sequence first, D hidden, Vl rows of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import batched
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.device import current_device
from megatron_kd.errors import ConfigError
from megatron_kd.losses import IMPLEMENTATIONS, DivergenceOutput
from megatron_kd.models.head import head_of, vocab_start
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.schedule import run_schedule
from megatron_kd.teacher.megatron_engine import MegatronTeacher
from megatron_kd.training.sums import TokenSums


@dataclass
class StepContext:
    """What one forward pass of the student needs beside its tokens, and what it leaves behind.

    Attributes:
        teacher: hidden states and head of an online teacher with ``targets: full``; None otherwise.
        mode: the loss's mode; ``no_grad`` in evaluation.
        output: set by the output processor.
        forward_kl: [N], set by it where the batch has a yardstick: forward KL and bucket tail against that.
    """

    batch: Batch
    teacher: tuple[Tensor, Tensor] | None
    mode: str
    ce_weight: float
    output: DivergenceOutput | None = field(default=None)
    forward_kl: Tensor | None = field(default=None)


class Distillation:
    """The loss of a recipe, ready to be handed to ``GPTModel.forward``; collective over the ranks of the model."""

    def __init__(self, recipe: Recipe, groups: ParallelGroups, teacher: MegatronTeacher | None) -> None:
        """``teacher``: needed online. Raises ConfigError where the recipe is online and there is none."""
        if recipe.teacher.mode == "online" and teacher is None:
            raise ConfigError("teacher.mode is online, but no teacher was built")
        self._loss = recipe.loss
        self._full = recipe.teacher.mode == "online" and recipe.teacher.targets == "full"
        self._groups = groups
        self._teacher = teacher if recipe.teacher.mode == "online" else None
        self.vocab_size = recipe.student.model.vocab_size
        self._folds = self.vocab_size < recipe.teacher.model.vocab_size
        # What the loss is scaled by beyond the divergence itself.
        self.t2 = recipe.loss.temperature**2 if recipe.loss.scale_by_t2 else 1.0
        self.is_plain_bucket_kl = (recipe.loss.divergence, recipe.loss.tail, recipe.loss.temperature) == (
            "forward_kl",
            "bucket",
            1.0,
        )
        self._method = IMPLEMENTATIONS[recipe.loss.implementation]

    def run(
        self,
        module: torch.nn.Module,
        batches: Sequence[Batch],
        *,
        seq_length: int,
        forward_only: bool,
        mode: str | None = None,
        ce_weight: float | None = None,
    ) -> list[Tensor]:
        """Micro batches through the student, and before each an online teacher. Collective over the model's ranks.

        Where experts are spread over ranks, those must all call this, with as many micro batches.

        Args:
            module: the student, or what wraps it for training.
            batches: of equal shape; stages before the last need no targets.
            seq_length: of whole rows.
            forward_only: no gradients.
            mode: of the loss; None: the recipe's.
            ce_weight: None: the recipe's.

        Returns:
            The ``TokenSums`` of each micro batch on the last stage; nothing on the others.
        """
        ce_weight = self._loss.ce_weight if ce_weight is None else ce_weight
        contexts = self._contexts(batches, mode or self._loss.mode, ce_weight)
        if self._teacher is not None and self._groups.pp_size > 1:
            # Its stages wait for each other as well: it is through with all of them before the student begins.
            contexts = iter(list(contexts))

        def forward(student: torch.nn.Module, _: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
            context = next(contexts)
            output = student(
                context.batch.tokens,
                context.batch.positions,
                context.batch.documents,
                output_processor=self,
                output_processor_context=context,
            )
            return output, partial(loss_function, context)

        return run_schedule(
            module,
            self._groups,
            range(len(batches)),
            forward,
            seq_length=seq_length,
            micro_batch_size=len(batches[0].sample_ids),
            forward_only=forward_only,
        )

    def _contexts(self, batches: Sequence[Batch], mode: str, ce_weight: float) -> Iterator[StepContext]:
        """What each pass of the student needs, made when it is asked for: as few as possible are in memory.

        Through the stages of a pipeline an online teacher's micro batches go together, or each would wait for the last.
        """
        together = len(batches) if self._groups.pp_size > 1 and self._teacher is not None else 1
        for portion in batched(batches, together):
            on_device = [batch.to(current_device()) for batch in portion]
            yield from (StepContext(batch, states, mode, ce_weight) for batch, states in self._ask(on_device))

    def _ask(self, batches: Sequence[Batch]) -> Iterable[tuple[Batch, tuple[Tensor, Tensor] | None]]:
        """Micro batches with the targets that an online teacher has for them, or with its hidden states and head.

        As they are where there is no such teacher, and before the last stage, where nobody looks at targets.
        """
        tokens = [batch.tokens for batch in batches]
        documents = [batch.documents for batch in batches if batch.documents is not None] or None
        if self._teacher is not None and self._full:
            states = self._teacher.hidden_states(tokens, documents)
            if states:
                return zip(batches, states, strict=True)
        elif self._teacher is not None:
            answers = self._teacher.top_k_of(tokens, documents)
            for answer in answers if self._folds else ():
                answer.targets.fold_beyond(self.vocab_size)
            if answers:
                batches = [replace(batch, targets=a.targets) for batch, a in zip(batches, answers, strict=True)]
        return ((batch, None) for batch in batches)

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: StepContext,
        config: TransformerConfig,
        **_: Any,
    ) -> Tensor:
        """The output processor: hidden [s, b, D] (its slice under sequence parallelism) → Σ w·l, a float32 scalar.

        No logits are built here; with the fused implementation none of [N, V] are built anywhere.
        """
        if config.use_mup:
            raise ConfigError("MuP scales the logits, which the losses do not apply: build the model without it")
        weight = head_of(output_layer, output_weight)
        shared: dict[str, Any] = {
            "divergence": self._loss.divergence,
            "beta": self._loss.beta,
            "scale_by_t2": self._loss.scale_by_t2,
            "labels": context.batch.labels if context.ce_weight > 0 else None,
            "ce_weight": context.ce_weight,
            "vocab_size": self.vocab_size,
            "vocab_start": vocab_start(weight, self._groups),
            "group": self._groups.tp_group,
            "sequence_parallel": self._groups.sequence_parallel,
            "mode": context.mode,
            "chunk_bytes": _bytes(self._loss.chunk_mib),
            "gradient_bytes": _bytes(self._loss.gradient_mib),
            "microbatches_in_flight": microbatches_in_flight(config),
            # The flag, not whether there is a main_grad: Megatron-Core's DDP always makes one, but adds to it itself.
            # Models are built without the flag, on a GPU too (the layers' kernel for it comes with apex): dW is then
            # returned in the dtype of the head.
            "main_grad_accumulation": config.gradient_accumulation_fusion,
        }
        weights = context.batch.token_weights
        if context.teacher is not None:
            teacher_hidden, teacher_weight = context.teacher
            output = self._method.full(
                hidden_states,
                weight,
                teacher_hidden,
                teacher_weight,
                weights,
                temperature=self._loss.temperature,
                **shared,
            )
        else:
            assert context.batch.targets is not None, "offline batches carry their targets"
            output = self._method.topk(
                hidden_states, weight, context.batch.targets, weights, tail=self._loss.tail, **shared
            )
        context.output = output
        if context.batch.yardstick is not None:
            plain = {"divergence": "forward_kl", "tail": "bucket", "labels": None, "ce_weight": 0.0}
            measured = self._method.topk(hidden_states, weight, context.batch.yardstick, weights, **(shared | plain))
            context.forward_kl = measured.loss_per_token
        return output.loss


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * 2**20)


def microbatches_in_flight(config: TransformerConfig) -> int:
    """How many losses at most are computed before the first of them goes backward, on the stage that has the loss.

    From ``megatron.core.pipeline_parallel.schedules``: without pipelining every forward pass is followed by its own
    backward pass, and so it is on the last stage of 1F1B, whose warm-up is empty: 1. With
    ``overlap_moe_expert_parallel_comm`` the next forward pass runs beside the backward pass: 2. Of interleaved stages
    the answer depends on the last, smaller group of microbatches; recipes build none.

    Raises:
        ConfigError: the stages are interleaved.
    """
    if config.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size is {config.virtual_pipeline_model_parallel_size}: how many losses "
            "are in flight with interleaved stages is not known here; build the model without them"
        )
    return 2 if config.overlap_moe_expert_parallel_comm else 1


def loss_function(context: StepContext, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What Megatron-Core's schedule asks for: the sum of the loss, the unmasked tokens, and the sums to report.

    The schedule divides the gradient by the unmasked tokens of the whole global batch.
    """
    assert context.output is not None, "the output processor ran"
    # A fill, not ``torch.tensor``: that copies from the host, which would wait for the whole forward pass.
    tokens = torch.full((), context.batch.num_tokens, dtype=torch.int, device=output.device)
    sums = TokenSums.of(context.output, context.batch, context.ce_weight, context.forward_kl)
    return output, tokens, sums.values
