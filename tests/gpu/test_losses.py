"""The losses on a GPU: against float64 on the CPU, without waiting for the host, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import IMPLEMENTATIONS
from megatron_kd.targets import TopKTargets

N, D, V, K = 65, 32, 777, 11
PADDED = 896
MODES = [("dense", "auto"), ("forward_chunked", "auto")] + [
    ("fused", mode) for mode in ("single_pass", "recompute", "frozen_head", "no_grad")
]


def problem(dtype: torch.dtype) -> dict[str, Any]:
    """Inputs rounded to ``dtype``; one row is left out and one has unused slots."""
    generator = torch.Generator().manual_seed(17)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    head = torch.randn(PADDED, D, generator=generator).to(dtype)
    teacher = torch.log_softmax(torch.randn(N, V, generator=generator, dtype=torch.float64) * 3, dim=1)
    logprobs, ids = teacher.topk(K, dim=1)
    tail = torch.logsumexp(teacher.scatter(1, ids, -torch.inf), dim=1)
    weights = torch.ones(N)
    weights[3] = 0
    return {
        "hidden": hidden,
        "head": head,
        "teacher_hidden": torch.randn(N, D, generator=generator).to(dtype),
        "teacher_head": torch.randn(PADDED, D, generator=generator).to(dtype),
        "targets": TopKTargets(ids.int(), logprobs.float(), tail.float(), 1.0),
        "weights": weights,
    }


def run(given: dict[str, Any], kind: str, name: str, mode: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The loss per token and, where the mode makes them, the gradients of hidden states and head; on the CPU."""
    hidden = given["hidden"].detach().to(device, dtype, copy=True).requires_grad_(mode != "no_grad")
    head = given["head"].detach().to(device, dtype, copy=True).requires_grad_(mode not in ("no_grad", "frozen_head"))
    weights = given["weights"].to(device)
    if kind == "topk":
        output = IMPLEMENTATIONS[name].topk(
            hidden, head, given["targets"].to(device), weights, vocab_size=V, mode=mode, chunk_bytes=4 * PADDED * 16
        )
    else:
        output = IMPLEMENTATIONS[name].full(
            hidden,
            head,
            given["teacher_hidden"].to(device, dtype),
            given["teacher_head"].to(device, dtype),
            weights,
            vocab_size=V,
            mode=mode,
            chunk_bytes=4 * PADDED * 16,
        )
    if mode != "no_grad":
        output.loss.backward()
    found = [output.loss_per_token, hidden.grad, head.grad]
    return [value.double().cpu() for value in found if value is not None]


@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_equals_float64(name: str, mode: str, dtype: torch.dtype, kind: str) -> None:
    given = problem(dtype)
    ours = run(given, kind, name, mode, "cuda", dtype)
    oracle = run(
        given, kind, "dense", "auto" if mode in ("auto", "single_pass", "recompute") else mode, "cpu", torch.float64
    )
    assert len(ours) == len(oracle) == {"no_grad": 1, "frozen_head": 2}.get(mode, 3)
    for got, expected in zip(ours, oracle, strict=True):
        # Values are float32 in both; a gradient is returned in the dtype of its input, bfloat16 having 8 bits.
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_the_fused_loss_never_waits_for_the_host(mode: str) -> None:
    given = problem(torch.bfloat16)
    hidden = given["hidden"].cuda().requires_grad_()
    head = given["head"].cuda().requires_grad_()
    targets, weights = given["targets"].to("cuda"), given["weights"].cuda()

    def step() -> None:
        IMPLEMENTATIONS["fused"].topk(hidden, head, targets, weights, vocab_size=V, mode=mode).loss.backward()

    step()  # libraries initialise themselves, with waits, at their first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def peak(name: str, chunk_bytes: int, tokens: int, vocab: int) -> int:
    """Bytes at the peak of a forward and backward pass beyond inputs."""
    hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(K, device="cuda", dtype=torch.int32).expand(tokens, K).contiguous()
    targets = TopKTargets(
        ids, torch.full((tokens, K), -4.0, device="cuda"), torch.full((tokens,), -0.25, device="cuda")
    )
    weights = torch.ones(tokens, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    IMPLEMENTATIONS[name].topk(
        hidden, head, targets, weights, vocab_size=vocab, mode="auto", chunk_bytes=chunk_bytes
    ).loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_only_the_fused_loss_is_independent_of_tokens_times_vocabulary() -> None:
    tokens, vocab, chunk = 8192, 32768, 64 << 20
    everything = 4 * tokens * vocab
    gradients = 4 * 256 * vocab + 2 * 256 * (vocab + tokens) * 2
    peaks = {name: peak(name, chunk, tokens, vocab) for name in ("fused", "forward_chunked", "dense")}
    assert peaks["fused"] < 3 * chunk + 2 * gradients + (64 << 20), peaks
    assert peaks["fused"] < everything / 2 < peaks["dense"], peaks
    assert peaks["fused"] < peaks["forward_chunked"], peaks
