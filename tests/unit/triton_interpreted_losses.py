"""Whole losses with the Triton passes against the same calls with the eager ones, in Triton's interpreter.

test_losses_triton.py runs this file in a process of its own; see triton_interpreted_passes.py for the reason.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import IMPLEMENTATIONS, TAILS, passes
from megatron_kd.losses.divergences import DIVERGENCES
from megatron_kd.losses.passes import Passes
from megatron_kd.losses.triton_passes import TritonPasses
from megatron_kd.targets import TopKTargets

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run this file with TRITON_INTERPRET=1: Triton must not have been imported without it")

# A select evaluates both sides: numpy warns of the NaN in the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BETA = 0.3
N, D, VOCAB, PADDED, K = 5, 4, 23, 26, 4
COMBINATIONS = [(name, tail) for tail, rules in TAILS.items() for name in rules.divergences]
# Recomputation shares its arithmetic with the single pass: once, with everything in it.
METHODS = [("single_pass", False), ("single_pass", True), ("recompute", True)]


def loss_and_gradients(kind: str, mode: str, everything: bool, **options: Any) -> list[Tensor]:
    """(loss per token, dH, dW, top-1 agreement); ``everything`` is temperature, soft-cap, labels, a row left out."""
    rng = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) * 1.5

    hidden, weight = normal(N, D).requires_grad_(), normal(PADDED, D).requires_grad_()
    teacher_hidden, teacher_weight = normal(N, D + 1), normal(PADDED, D + 1)
    temperature = 1.7 if everything else 1.0
    token_weights = torch.rand(N, generator=rng) + 0.5
    if everything:
        token_weights[2] = 0.0
        labels = torch.tensor([3, -100, 7, 0, VOCAB - 1])
        options |= {"logit_softcap": 5.0, "labels": labels, "ce_weight": 0.3}
    options |= {"vocab_size": VOCAB, "mode": mode, "beta": BETA, "chunk_bytes": 4 * 3 * VOCAB}
    if kind == "topk":
        logp = torch.log_softmax(teacher_hidden @ teacher_weight[:VOCAB].t() / temperature, dim=1)
        best = logp.topk(K, dim=1)
        ids = best.indices.to(torch.int32)
        ids[0, -1] = -1
        logprobs = best.values.masked_fill(ids < 0, -torch.inf)
        tail = torch.log1p(-logprobs.exp().sum(dim=1))
        targets = TopKTargets(ids, logprobs, tail, temperature)
        result = IMPLEMENTATIONS["fused"].topk(hidden, weight, targets, token_weights, **options)
    else:
        options["temperature"] = temperature
        result = IMPLEMENTATIONS["fused"].full(hidden, weight, teacher_hidden, teacher_weight, token_weights, **options)
    result.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [result.loss_per_token, hidden.grad, weight.grad, result.statistics.top1_agreement]


def check_forms_agree(monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, everything: bool, **options: Any) -> None:
    expected = loss_and_gradients(kind, mode, everything, **options)
    used = []

    def triton_form(device: torch.device) -> Passes:
        used.append(device)
        return TritonPasses()

    monkeypatch.setattr(passes, "passes_for", triton_form)
    got = loss_and_gradients(kind, mode, everything, **options)
    assert used, "the loss did not ask for its passes"
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(("mode", "everything"), METHODS)
@pytest.mark.parametrize(("name", "tail"), COMBINATIONS)
def test_topk_losses_agree(monkeypatch: pytest.MonkeyPatch, name: str, tail: str, mode: str, everything: bool) -> None:
    check_forms_agree(monkeypatch, "topk", mode, everything, divergence=name, tail=tail)


@pytest.mark.parametrize(("mode", "everything"), METHODS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_full_losses_agree(monkeypatch: pytest.MonkeyPatch, name: str, mode: str, everything: bool) -> None:
    check_forms_agree(monkeypatch, "full", mode, everything, divergence=name)
