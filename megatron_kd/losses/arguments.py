"""The checked arguments of one call, shared by the three implementations.

N tokens in all (s·b), n = N/tp of them on this rank under sequence parallelism, D hidden, Vl rows of the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.losses.collectives import TensorParallelGroup
from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.projection import compute_dtype
from megatron_kd.losses.sizes import single_pass_fits
from megatron_kd.losses.transfer import to_device
from megatron_kd.targets import TopKTargets

MODES = ("auto", "single_pass", "frozen_head", "recompute", "no_grad")
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Settings:
    """How a loss is computed, checked.

    Attributes:
        tail: of cached targets; None against a full-vocabulary teacher.
        teacher_logit_softcap: of a full-vocabulary teacher.
        mode: resolved, never ``auto``.
        chunk_bytes: None for the default of the device.

    Raises ValueError for a budget that is not positive.
    """

    divergence: Divergence
    tail: str | None
    teacher_logit_softcap: float | None
    mode: str
    chunk_bytes: int | None
    main_grad_accumulation: bool

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive, not {self.chunk_bytes}")


@dataclass(frozen=True)
class LossArguments:
    """What both kinds of teacher share. Tensors per token are flat [N], in the order of the gathered hidden states.

    Attributes:
        vocab_rows: the rows of this rank's shard that are real vocabulary; those after them are padding.
        t2: T² or 1, on the value and the gradient of the divergence.
        dtype: of all arithmetic and of the results; float32, or float64 if an input is float64.
        device: of all arithmetic and of the results; ``token_weights`` and ``labels`` may lie on the CPU.
    """

    token_weights: Tensor
    labels: Tensor | None
    ce_weight: float
    temperature: float
    t2: float
    vocab_size: int
    vocab_start: int
    vocab_rows: int
    logit_softcap: float | None
    tp: TensorParallelGroup
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def device_weights(self) -> Tensor:
        """The token weights [N] where and as the arithmetic needs them; copied once a call."""
        return to_device(self.token_weights, self.device).to(self.dtype)

    @cached_property
    def device_labels(self) -> Tensor | None:
        """The labels [N] on the device; copied once a call."""
        return None if self.labels is None else to_device(self.labels, self.device)

    @property
    def tokens(self) -> int:
        """N."""
        return self.token_weights.numel()

    @property
    def kd_scale(self) -> float:
        """What the divergence of a token is multiplied by in the loss."""
        return self.t2 * (1.0 - self.ce_weight)

    @property
    def mixes_ce(self) -> bool:
        """Whether cross-entropy with hard labels is part of the loss."""
        return self.labels is not None


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    token_weights: Tensor,
    *,
    temperature: float,
    scale_by_t2: bool,
    labels: Tensor | None,
    ce_weight: float,
    vocab_size: int,
    vocab_start: int,
    logit_softcap: float | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> LossArguments:
    """Raises ValueError, saying what contradicts what, where shapes, ranges or options cannot be right."""
    check_floating(hidden=hidden, weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [vocabulary rows, hidden], not {tuple(weight.shape)}")
    if hidden.dim() not in (2, 3) or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, {weight.shape[1]}] or [s, b, {weight.shape[1]}], not {tuple(hidden.shape)}"
        )
    tp = TensorParallelGroup(group)
    slices = tp.size if sequence_parallel else 1
    leading = (hidden.shape[0] * slices, *hidden.shape[1:-1])
    tokens = hidden.shape[:-1].numel() * slices
    check_per_token("token_weights", token_weights, leading, tokens)
    if token_weights.is_complex():
        raise ValueError(f"token_weights must be real numbers, not {token_weights.dtype}")
    if not token_weights.is_floating_point():
        token_weights = token_weights.to(torch.float32)
    if not 0.0 <= ce_weight <= 1.0:
        raise ValueError(f"ce_weight must lie in [0, 1], not {ce_weight}")
    if ce_weight > 0 and labels is None:
        raise ValueError(f"ce_weight is {ce_weight} but no labels were given")
    if labels is not None:
        check_per_token("labels", labels, leading, tokens)
        if labels.dtype not in (torch.int64, torch.int32, torch.int16):
            raise ValueError(f"labels must be token ids in whole numbers of 16 bits or more, not {labels.dtype}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    check_softcap("logit_softcap", logit_softcap)
    if vocab_size < 1 or vocab_start < 0:
        raise ValueError(f"vocab_size {vocab_size} must be positive and vocab_start {vocab_start} not negative")
    if tp.size == 1 and (vocab_start != 0 or weight.shape[0] < vocab_size):
        raise ValueError(
            f"without a tensor-parallel group the head must hold the whole vocabulary: it has rows {vocab_start} to "
            f"{vocab_start + weight.shape[0]} of {vocab_size}"
        )
    mixed = labels is not None and ce_weight > 0
    return LossArguments(
        token_weights=token_weights.detach().reshape(-1),
        labels=labels.reshape(-1) if labels is not None and mixed else None,
        ce_weight=ce_weight,
        temperature=temperature,
        t2=temperature**2 if scale_by_t2 else 1.0,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        vocab_rows=min(weight.shape[0], max(0, vocab_size - vocab_start)),
        logit_softcap=logit_softcap,
        tp=tp,
        sequence_parallel=sequence_parallel and tp.size > 1,
        dtype=compute_dtype(hidden, weight),
        device=hidden.device,
    )


def check_floating(**tensors: Tensor) -> None:
    """Raises ValueError for hidden states or heads that are not floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {tensor.dtype}")


def check_softcap(name: str, softcap: float | None) -> None:
    """Raises ValueError unless the cap is None or a positive number."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name} must be positive and finite, or None for none; not {softcap}")


def gathered_leading(hidden: Tensor, arguments: LossArguments) -> tuple[int, ...]:
    """The leading shape of the gathered hidden states: (N,) or (s, b)."""
    slices = arguments.tp.size if arguments.sequence_parallel else 1
    return (hidden.shape[0] * slices, *hidden.shape[1:-1])


def check_per_token(name: str, tensor: Tensor, leading: tuple[int, ...], tokens: int) -> None:
    """Accepts [N] and the leading shape of the gathered hidden states; [b, s] for [s, b] is the usual mistake."""
    shape = tuple(tensor.shape)
    if shape != (tokens,) and shape != leading:
        wanted = f"({tokens},)" if leading == (tokens,) else f"{tuple(leading)} or ({tokens},)"
        raise ValueError(f"{name} has shape {shape}; the gathered hidden states need {wanted}, sequence first")


def check_targets(
    targets: TopKTargets, arguments: LossArguments, leading: tuple[int, ...], device: torch.device
) -> TopKTargets:
    """The targets as [N, K]; raises ValueError for another number of tokens, no slots or another device."""
    check_per_token("targets", targets.tail_logmass, leading, arguments.tokens)
    if targets.top_k < 1:
        raise ValueError("targets have no slots (K = 0)")
    if targets.ids.device != device:
        raise ValueError(f"targets lie on {targets.ids.device}, hidden on {device}: move them with targets.to()")
    flat = targets.flatten()
    # The teacher is a constant, also where its log-probabilities have a graph.
    return replace(flat, logprobs=flat.logprobs.detach(), tail_logmass=flat.tail_logmass.detach())


def check_values(arguments: LossArguments, targets: TopKTargets | None) -> None:
    """What only the numbers can tell; raises ValueError, naming the argument, the token and what was seen.

    Ids and labels outside the vocabulary, a tail or log-probability that is NaN or no logarithm of a probability, at
    a token whose weight is not 0: rows of weight 0 may hold anything. On a GPU ids and labels are checked by a
    device-side assertion, since reading the answer would stop the host, and a NaN shows as a NaN loss.
    """
    if not arguments.tokens:
        return
    labels = arguments.labels
    if labels is not None and labels.device != arguments.token_weights.device:
        # Bringing the weights of a GPU to labels on the CPU would stop the host.
        labels = arguments.device_labels
    if labels is not None:
        labels = torch.where(labels == IGNORED_LABEL, 0, labels)
        _check_ids("labels", labels, labels, 0, arguments)
    if targets is None:
        return
    _check_ids("targets.ids", targets.ids.amin(dim=1), targets.ids.amax(dim=1), -1, arguments)
    if targets.ids.device.type == "cpu":
        used = targets.logprobs.masked_fill(targets.ids < 0, -torch.inf)
        _check_logs("targets.logprobs", used.amax(dim=1), arguments)
        _check_logs("targets.tail_logmass", targets.tail_logmass, arguments)


# A log-probability may pass 0 by the rounding of 16-bit storage, not by more.
_LOG_SLACK = 0.01


def _check_logs(name: str, highest: Tensor, arguments: LossArguments) -> None:
    # NaN compares false, so the question is whether the value is right.
    wrong = ~(highest <= _LOG_SLACK) & _counted(arguments, highest.device)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"{name}: {float(highest[row])} at token {row} is not the logarithm of a probability")


def _counted(arguments: LossArguments, device: torch.device) -> Tensor:
    """bool [N], where the weight is not 0, on the device of what is checked."""
    weights = arguments.token_weights
    return (weights if weights.device == device else arguments.device_weights) != 0


def _check_ids(name: str, lowest: Tensor, highest: Tensor, least: int, arguments: LossArguments) -> None:
    wrong = (lowest < least) | (highest >= arguments.vocab_size)
    wrong &= _counted(arguments, wrong.device)
    if wrong.device.type != "cpu":
        torch._assert_async(~wrong.any())
    elif bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        value = int(lowest[row]) if int(lowest[row]) < least else int(highest[row])
        raise ValueError(f"{name}: id {value} at token {row} is outside [{least}, {arguments.vocab_size})")


def resolve_mode(
    mode: str,
    hidden: Tensor,
    weight: Tensor,
    arguments: LossArguments,
    *,
    microbatches_in_flight: int,
    gradient_bytes: int | None,
) -> str:
    """The mode that runs: what was asked for, or the cheapest that gives the gradients that are required.

    ``auto`` is ``no_grad`` where nothing requires a gradient. Else it is a single pass (``frozen_head`` where only the
    hidden states require a gradient), unless that would hold too much between forward and backward: dH and a float32
    dW for every microbatch in flight. Too much is more than ``gradient_bytes``; without a budget, any second
    microbatch. Then it is ``recompute``, which holds nothing of the kind.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not available; available: {', '.join(MODES)}")
    if microbatches_in_flight < 1:
        raise ValueError(f"microbatches_in_flight must be at least 1, not {microbatches_in_flight}")
    if gradient_bytes is not None and gradient_bytes < 0:
        raise ValueError(f"gradient_bytes must not be negative, not {gradient_bytes}")
    trains_head = weight.requires_grad and torch.is_grad_enabled()
    trains_body = hidden.requires_grad and torch.is_grad_enabled()
    if mode == "frozen_head" and trains_head:
        raise ValueError("mode 'frozen_head' was asked for a head that requires a gradient: detach it, or use 'auto'")
    if not (trains_head or trains_body):
        return "no_grad"
    if mode != "auto":
        return mode
    # The shard is taken as ⌈vocabulary/tp⌉ rows, so that ranks with uneven shards decide alike.
    shard = -(-arguments.vocab_size // arguments.tp.size)
    held = trains_head * shard * weight.shape[1] * arguments.dtype.itemsize
    held += trains_body * hidden.numel() * hidden.dtype.itemsize
    if not single_pass_fits(held, microbatches_in_flight, gradient_bytes):
        return "recompute"
    return "single_pass" if trains_head else "frozen_head"
