"""The losses on a GPU: against float64 on the CPU, without waiting for the host, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import IMPLEMENTATIONS, geometry
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


@pytest.mark.parametrize("labels_on", ["cuda", "cpu"])
@pytest.mark.parametrize("weights_on", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_the_fused_loss_never_waits_for_the_device(mode: str, weights_on: str, labels_on: str) -> None:
    """With weights on the CPU, as in training, the row of weight 0 is left out: other rows are then gathered."""
    given = problem(torch.bfloat16)
    hidden = given["hidden"].cuda().requires_grad_()
    head = given["head"].cuda().requires_grad_()
    targets, weights = given["targets"].to("cuda"), given["weights"].to(weights_on)
    labels = given["targets"].ids[:, 0].long().to(labels_on)

    def step() -> None:
        IMPLEMENTATIONS["fused"].topk(
            hidden, head, targets, weights, labels=labels, ce_weight=0.3, vocab_size=V, mode=mode
        ).loss.backward()

    step()  # libraries initialise themselves, with waits, at their first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_the_host_runs_ahead_of_a_busy_device() -> None:
    """What the synchronisation check cannot see: a copy from pageable memory that waits for the work before it."""
    tokens, vocab = 1 << 16, 256  # weights of 256 KiB; the driver takes small copies along with the command
    hidden = torch.randn(tokens, 16, device="cuda", requires_grad=True)
    head = torch.randn(vocab, 16, device="cuda", requires_grad=True)
    ids = torch.arange(K, device="cuda", dtype=torch.int32).expand(tokens, K).contiguous()
    targets = TopKTargets(
        ids, torch.full((tokens, K), -4.0, device="cuda"), torch.full((tokens,), -0.25, device="cuda")
    )
    weights = torch.ones(tokens)
    weights[::7] = 0

    def forward() -> Tensor:
        return IMPLEMENTATIONS["fused"].topk(hidden, head, targets, weights, vocab_size=vocab).loss

    forward()
    torch.cuda.synchronize()
    torch.cuda._sleep(5_000_000_000)  # some seconds
    busy = torch.cuda.Event()
    busy.record()
    forward()
    assert not busy.query(), "the host waited"
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
@pytest.mark.parametrize("main_grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_on_a_gpu(main_grad_dtype: torch.dtype, mode: str) -> None:
    given = problem(torch.bfloat16)
    head = torch.nn.Parameter(given["head"].cuda())
    head.main_grad = torch.ones(head.shape, device="cuda", dtype=main_grad_dtype)  # type: ignore[attr-defined]
    IMPLEMENTATIONS["fused"].topk(
        given["hidden"].cuda(),
        head,
        given["targets"].to("cuda"),
        given["weights"].cuda(),
        vocab_size=V,
        mode=mode,
        chunk_bytes=4 * PADDED * 16,
        main_grad_accumulation=True,
    ).loss.backward()
    expected = run(given, "topk", "dense", "auto", "cpu", torch.float64)[2]
    added = head.main_grad.double().cpu() - 1  # type: ignore[attr-defined]
    # bfloat16 rounds 1 + dW at every chunk.
    tolerance = 2e-2 * expected.abs().max() + (0 if main_grad_dtype is torch.float32 else 5 * 2**-8)
    assert (added - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_the_vocabulary_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str) -> None:
    given = problem(dtype)
    oracle = run(given, kind, "dense", "auto", "cpu", torch.float64)
    monkeypatch.setattr(geometry, "LONG_CONTEXT_ROWS", 1)
    monkeypatch.setattr(geometry, "tile_shape", lambda *_: (16, 256))
    ours = run(given, kind, "fused", "recompute", "cuda", dtype)
    for got, expected in zip(ours, oracle, strict=True):
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


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
