"""Other people's losses for the same task, called as their own trainers call them, where they are installed.

- ``megatron_lm_topk``: the cached top-K KL of ``megatron.training.distillation`` over dense logits. Its tail is one
  more outcome, of probability 1 − Σ over the cached ids on both sides: our ``bucket`` where the cache says the same.
- ``torch_linear_cross_entropy``: ``torch.nn.functional.linear_cross_entropy`` with class probabilities [N, V]. Its
  chunked path takes class indices only (torch 2.13: with probabilities, ``options`` is ignored with a warning), so this
  is its unchunked one. Cross-entropy has the gradient of the forward KL over the whole vocabulary.
- ``liger_jsd``: Liger's fused linear JSD (β = 0.5) against a teacher of the student's size with hidden states and head
  of its own, whose projection is a fourth one. Triton: on a GPU only.

N tokens, D hidden, V vocabulary, K cached tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_kd.bench.cases import Case, Loss, training_pass
from megatron_kd.bench.inputs import LossInputs
from megatron_kd.bench.settings import DTYPES, Setting
from megatron_kd.device.platform import CPU_NAME
from megatron_kd.targets import TopKTargets


class PeerUnavailableError(Exception):
    """Not installed, or not for this device; the message says which."""


@dataclass(frozen=True)
class Peer:
    """A peer.

    Attributes:
        check: raises ``PeerUnavailableError`` on a device where it cannot be measured.
        loss: makes a peer's own form of the targets, and returns its loss.
        remark: (N, sizes) → what a reader of its figures must know, or nothing.
    """

    name: str
    check: Callable[[torch.device], None]
    loss: Callable[[LossInputs], Loss]
    remark: Callable[[int, Setting], str]

    def case(self, inputs: LossInputs) -> Case:
        """What is measured. Its form of the targets is made anew for each pass: it can be larger than all else."""
        return Case(self.name, "", lambda: training_pass(inputs, self.loss(inputs)), peer=True)


def available_peers(place: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can be measured on a device, and for each other one a line that says why not."""
    found, notes = [], []
    for peer in PEERS:
        try:
            peer.check(place)
            found.append(peer)
        except PeerUnavailableError as reason:
            notes.append(f"{peer.name} is left out: {reason}")
    return found, notes


def _import(module: str, *names: str) -> list[Any]:
    try:
        found = importlib.import_module(module)
        return [getattr(found, name) for name in names]
    except Exception as error:  # of whatever kind: a broken peer must not keep us from measuring the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PeerUnavailableError(f"{' and '.join(names)} of {module} cannot be imported ({reason})") from error


def _megatron_lm() -> list[Any]:
    topk_kl_div, wrapper = _import(
        "megatron.training.distillation.cached_logits_loss", "topk_kl_div", "LossFuncCallable"
    )
    try:
        return [topk_kl_div, wrapper._mask_loss]
    except AttributeError as error:
        raise PeerUnavailableError(f"megatron.training.distillation has changed ({error})") from error


def megatron_lm_topk(inputs: LossInputs) -> Loss:
    """Megatron-LM's loss on one tensor-parallel rank, a batch of one sequence of N tokens, without its hard labels.

    Its targets: values [N, 1, K] as cached, indices int64 [N, 1, K]. Logits in the dtype of the model.
    """
    topk_kl_div, masked_sum = _megatron_lm()
    values = inputs.targets.logprobs[:, None]
    indices = inputs.targets.ids[:, None].long()
    mask = inputs.token_weights.to(inputs.hidden.device)[None]

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden[:, None], head)
        per_token = topk_kl_div(logits, values, indices, 1, 0, None, add_ghost_token=True)
        return masked_sum(per_token, mask)

    return loss


def torch_linear_cross_entropy(inputs: LossInputs) -> Loss:
    """Cross-entropy against dense float32 probabilities [N, V]."""
    probabilities = dense_probabilities(inputs.targets, inputs.vocab)
    (linear_cross_entropy,) = _import("torch.nn.functional", "linear_cross_entropy")

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, head, probabilities, reduction="sum")

    return loss


def dense_probabilities(targets: TopKTargets, vocab: int) -> Tensor:
    """float32 [N, V]: the cached probabilities at their ids, the tail's mass spread evenly over the others."""
    tokens, top_k = targets.ids.shape
    share = targets.tail_logmass.exp()[:, None] / max(vocab - top_k, 1)
    dense = torch.empty(tokens, vocab, device=targets.ids.device).copy_(share.expand(tokens, vocab))
    return dense.scatter_(1, targets.ids.long(), targets.logprobs.float().exp())


def liger_jsd(inputs: LossInputs) -> Loss:
    """Liger's mean over the tokens, for a teacher with other hidden states and another head of the same sizes."""
    (jsd,) = _import("liger_kernel.transformers", "LigerFusedLinearJSD")
    method = jsd(jsd_beta=0.5, temperature=1.0)
    teacher_hidden, teacher_head = inputs.hidden.roll(1, dims=0), inputs.head.roll(1, dims=0)

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return method(hidden, head, teacher_hidden, teacher_head, None)

    return loss


def _check_megatron_lm(_: torch.device) -> None:
    _megatron_lm()


def _check_torch(_: torch.device) -> None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise PeerUnavailableError(f"torch {torch.__version__} has no linear_cross_entropy; it came with 2.13")


def _check_liger(place: torch.device) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        raise PeerUnavailableError("liger-kernel is not installed")
    if place.type == CPU_NAME:
        raise PeerUnavailableError("its kernels need a GPU")
    _import("liger_kernel.transformers", "LigerFusedLinearJSD")


def _no_remark(tokens: int, setting: Setting) -> str:
    return ""


def _torch_remark(tokens: int, setting: Setting) -> str:
    return f"the teacher's float32 probabilities [N, V] {_at(4 * tokens * setting.vocab, tokens)}"


def _liger_remark(tokens: int, setting: Setting) -> str:
    size = (tokens + setting.vocab) * setting.hidden * DTYPES[setting.dtype].itemsize
    return f"the teacher's hidden states and head {_at(size, tokens)}"


def _at(size: int, tokens: int) -> str:
    return f"are inputs of it, which extra_bytes does not count: {size / 2**20:,.1f} MiB at {tokens:,} tokens"


PEERS = (
    Peer("megatron_lm_topk", _check_megatron_lm, megatron_lm_topk, _no_remark),
    Peer("torch_linear_cross_entropy", _check_torch, torch_linear_cross_entropy, _torch_remark),
    Peer("liger_jsd", _check_liger, liger_jsd, _liger_remark),
)
