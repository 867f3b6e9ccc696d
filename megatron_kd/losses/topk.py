"""The public signature of the losses on cached top-K targets, one for all implementations."""

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
    check_targets,
    gathered_leading,
    resolve_mode,
)
from megatron_kd.losses.divergences import check_divergence, make_divergence
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.targets import TopKTargets

TopKMethod = Callable[[Tensor, Tensor, TopKTargets, LossArguments, Settings], DivergenceOutput]


@dataclass(frozen=True)
class TopKDivergence:
    """A loss on cached targets, computed by ``method``: a function of hidden states and the head's weight.

    Σ_n w_n·[(1 − ce_weight)·T²·D(teacher_n ‖ student_n) + ce_weight·CE_n], where the student's distribution is
    softmax(y/T), y = hidden·weightᵀ (soft-capped where asked), T the temperature of the targets; the cross-entropy
    is at T = 1.

    Shapes. N = s·b tokens over the tensor-parallel group, D hidden, K cached ids, Vl rows of this rank's shard.
    ``hidden`` is [N, D] or [s, b, D], with ``sequence_parallel`` the rank's slice [N/tp, D] or [s/tp, b, D], of any
    strides and floating dtype. ``targets``, ``token_weights`` and ``labels`` always cover all N tokens, the same on
    every rank, as [N] (sequence first: row s·B + b) or [s, b], and are already shifted: row n belongs to the token
    after position n. ``token_weights`` and ``labels`` may lie on the CPU when ``hidden`` is on a GPU; only then are
    rows of weight 0 left out of the GEMMs there (see ``plan_rows``).

    Collectives. All ranks of ``group`` call, and go backward, together. The output is equal on all of them.

    Precision. All arithmetic is float32 (float64 for float64 inputs), under autocast too. The backward pass of the
    two references is autograd's own: call it outside of autocast, as torch advises.
    """

    method: TopKMethod

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: TopKTargets,
        token_weights: Tensor,
        *,
        divergence: str = "forward_kl",
        beta: float = 0.5,
        tail: str = "bucket",
        scale_by_t2: bool = True,
        labels: Tensor | None = None,
        ce_weight: float = 0.0,
        vocab_size: int,
        vocab_start: int = 0,
        logit_softcap: float | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        mode: str = "auto",
        chunk_bytes: int | None = None,
        main_grad_accumulation: bool = False,
        microbatches_in_flight: int = 1,
        gradient_bytes: int | None = None,
    ) -> DivergenceOutput:
        """The loss, and what was seen on the way.

        Args:
            hidden: the last hidden states.
            weight: this rank's shard [Vl, D] of the head, whose first row is row ``vocab_start`` of the vocabulary.
                Rows from ``vocab_size`` on are padding: no mass, a gradient of 0.
            targets: the teacher's cached distributions.
            token_weights: w_n, 0 for tokens left out. Nothing depends on the targets of such tokens.
            divergence: a name in ``DIVERGENCES``.
            beta: of jsd, β·KL(p ‖ m) + (1 − β)·KL(q ‖ m) with m = β·p + (1 − β)·q; in (0, 1).
            tail: a name in ``TAILS``: what becomes of the vocabulary outside the cached ids. ``bucket`` and
                ``renormalize_both`` go with every divergence, ``renormalize_teacher`` with all but reverse_kl,
                ``truncate`` with forward_kl.
            scale_by_t2: multiply the divergence and its gradient by T².
            labels: hard labels, used with ``ce_weight`` > 0. A token with label −100 has no cross-entropy and keeps
                its (1 − ce_weight)·divergence.
            ce_weight: the share of the cross-entropy, in [0, 1].
            vocab_size: the true vocabulary over all ranks.
            logit_softcap: y = cap·tanh(x/cap).
            group: the tensor-parallel group; None is one rank.
            mode: ``auto``, ``single_pass``, ``frozen_head``, ``recompute`` or ``no_grad``; see ``resolve_mode``. The
                gradient of a single pass can be taken once, that of ``recompute`` repeatedly. The two references
                only know whether a gradient is wanted.
            chunk_bytes: budget of the chunk buffers; None is 64 MiB on a CPU, 1.5 GiB on a GPU.
            main_grad_accumulation: add the head's gradient to ``weight.main_grad`` (Megatron-Core's
                ``gradient_accumulation_fusion``) rather than return it. The two references always return it, which
                Megatron-Core accepts as well.
            microbatches_in_flight: forward passes before the first backward pass; with
            gradient_bytes: the most that may be held from forward to backward, it decides ``auto``; see
                ``resolve_mode``. None: any amount for one microbatch in flight, nothing for more.

        Raises:
            ValueError: for shapes, options or (in CPU memory) ids and labels that cannot be right.
        """
        check_divergence(divergence, tail, beta)
        arguments = check_arguments(
            hidden,
            weight,
            token_weights,
            temperature=targets.temperature,
            scale_by_t2=scale_by_t2,
            labels=labels,
            ce_weight=ce_weight,
            vocab_size=vocab_size,
            vocab_start=vocab_start,
            logit_softcap=logit_softcap,
            group=group,
            sequence_parallel=sequence_parallel,
        )
        flat = check_targets(targets, arguments, gathered_leading(hidden, arguments), hidden.device)
        resolved = resolve_mode(
            mode,
            hidden,
            weight,
            arguments,
            microbatches_in_flight=microbatches_in_flight,
            gradient_bytes=gradient_bytes,
        )
        settings = Settings(
            make_divergence(divergence, beta), tail, None, resolved, chunk_bytes, main_grad_accumulation
        )
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and resolved != "no_grad"),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            return self.method(hidden, weight, flat, arguments, settings)
