"""The public signature of the losses against a full-vocabulary teacher, one for all implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.losses.arguments import (
    LossArguments,
    Settings,
    check_arguments,
    check_floating,
    check_softcap,
    resolve_mode,
)
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.divergences import check_divergence, make_divergence
from megatron_kd.losses.output import DivergenceOutput

FullMethod = Callable[[Tensor, Tensor, Head, LossArguments, Settings], DivergenceOutput]


@dataclass(frozen=True)
class FullDivergence:
    """Online distillation: the teacher's distribution comes from its own hidden states and head, without gradient.

    Shapes, collectives, temperature and cross-entropy are those of ``TopKDivergence``. The teacher's hidden size may
    differ; its head holds the same rows of the same vocabulary (the padding may differ), and under
    ``sequence_parallel`` its hidden states are sliced as the student's.
    """

    method: FullMethod

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        token_weights: Tensor,
        *,
        temperature: float = 1.0,
        divergence: str = "forward_kl",
        beta: float = 0.5,
        scale_by_t2: bool = True,
        labels: Tensor | None = None,
        ce_weight: float = 0.0,
        vocab_size: int,
        vocab_start: int = 0,
        logit_softcap: float | None = None,
        teacher_logit_softcap: float | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        mode: str = "auto",
        chunk_bytes: int | None = None,
        main_grad_accumulation: bool = False,
        microbatches_in_flight: int = 1,
        gradient_bytes: int | None = None,
    ) -> DivergenceOutput:
        """The loss; arguments that are not named here are those of ``TopKDivergence``.

        Args:
            teacher_hidden: the teacher's last hidden states, the leading shape of ``hidden``, size Dt.
            teacher_weight: the teacher's head [Vl or more or fewer padding rows, Dt], from row ``vocab_start`` on.
            temperature: T of both softmaxes.
            teacher_logit_softcap: the soft-cap of the teacher's logits.

        Raises:
            ValueError: for shapes, options or (in CPU memory) labels that cannot be right.
        """
        check_divergence(divergence, None, beta)
        arguments = check_arguments(
            hidden,
            weight,
            token_weights,
            temperature=temperature,
            scale_by_t2=scale_by_t2,
            labels=labels,
            ce_weight=ce_weight,
            vocab_size=vocab_size,
            vocab_start=vocab_start,
            logit_softcap=logit_softcap,
            group=group,
            sequence_parallel=sequence_parallel,
        )
        _check_teacher(hidden, teacher_hidden, teacher_weight, arguments, teacher_logit_softcap)
        resolved = resolve_mode(
            mode,
            hidden,
            weight,
            arguments,
            microbatches_in_flight=microbatches_in_flight,
            gradient_bytes=gradient_bytes,
        )
        settings = Settings(
            make_divergence(divergence, beta),
            None,
            teacher_logit_softcap,
            resolved,
            chunk_bytes,
            main_grad_accumulation,
        )
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and resolved != "no_grad"),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            teacher = Head(teacher_hidden.detach(), teacher_weight.detach())
            return self.method(hidden, weight, teacher, arguments, settings)


def _check_teacher(
    hidden: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    arguments: LossArguments,
    teacher_logit_softcap: float | None,
) -> None:
    check_floating(teacher_hidden=teacher_hidden, teacher_weight=teacher_weight)
    if teacher_weight.dim() != 2 or teacher_weight.shape[0] < arguments.vocab_rows:
        raise ValueError(
            f"teacher_weight {tuple(teacher_weight.shape)} must be [rows, hidden] with at least the "
            f"{arguments.vocab_rows} vocabulary rows of the student's shard: both heads need the same vocabulary"
        )
    expected = (*hidden.shape[:-1], teacher_weight.shape[1])
    if tuple(teacher_hidden.shape) != expected:
        raise ValueError(f"teacher_hidden has shape {tuple(teacher_hidden.shape)}, expected {expected}")
    check_softcap("teacher_logit_softcap", teacher_logit_softcap)
