"""``bench loss``: time, counted bytes and counted FLOPs of every implementation beside three bare GEMMs.

N tokens, D hidden, V vocabulary, K cached tokens. The floor is what no exact gradient can go below: the logits, the
gradient of the hidden states and that of the head, as one GEMM each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.device import select_device, synchronize
from megatron_kd.device.platform import CPU_NAME
from megatron_kd.errors import ConfigError
from megatron_kd.losses import IMPLEMENTATIONS, peak_extra_bytes
from megatron_kd.progress import progress
from megatron_kd.targets import TopKTargets

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What is measured: implementation and mode. The references know no modes.
CASES = (
    ("floor", ""),
    ("fused", "single_pass"),
    ("fused", "recompute"),
    ("fused", "frozen_head"),
    ("fused", "no_grad"),
    ("forward_chunked", ""),
    ("dense", ""),
)


@dataclass(frozen=True)
class LossBenchmark:
    """One row of the result.

    Attributes:
        seconds_median: over the rounds, forward and backward (forward alone for ``no_grad``).
        ratio_to_floor: median over the rounds of the time divided by the floor's time in the same round.
        extra_bytes: peak bytes of tensors made during a pass, gradients included.
        flops: of all matrix products.
    """

    implementation: str
    mode: str
    tokens: int
    hidden: int
    vocab: int
    top_k: int
    device: str
    seconds_median: float
    ratio_to_floor: float
    extra_bytes: int
    flops: int


def bench_loss(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    top_k: int,
    dtype: str = "fp32",
    chunk_mib: float = 64.0,
    device: str = CPU_NAME,
    rounds: int = 7,
    show_progress: bool = True,
) -> list[dict[str, Any]]:
    """Measures all cases, interleaved round by round after one warm-up, so that load falls on all alike.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: sizes that cannot be, an unknown dtype, no such device.
    """
    if min(tokens, hidden, vocab, top_k, rounds) < 1 or top_k > vocab or chunk_mib <= 0:
        raise ConfigError("tokens, hidden, vocab, top-k, rounds and chunk-mib must be positive, top-k at most vocab")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    place = select_device(device)
    inputs = _inputs(tokens, hidden, vocab, top_k, DTYPES[dtype], place)
    passes = {case: _pass(case, inputs, vocab, int(chunk_mib * 2**20)) for case in CASES}
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    flops: dict[tuple[str, str], int] = {}
    extra: dict[tuple[str, str], int] = {}
    with progress("bench loss", len(CASES) * (rounds + 1), unit="passes", enabled=show_progress) as advance:
        for case, run in passes.items():  # the warm-up counts
            flops[case] = _count_flops(run)
            extra[case] = _extra_bytes(run, place)
            advance(1)
        for _ in range(rounds):
            for case, run in passes.items():
                synchronize()
                started = time.perf_counter()
                run()
                synchronize()
                seconds[case].append(time.perf_counter() - started)
                advance(1)
    floor = seconds[CASES[0]]
    return [
        asdict(
            LossBenchmark(
                implementation=case[0],
                mode=case[1],
                tokens=tokens,
                hidden=hidden,
                vocab=vocab,
                top_k=top_k,
                device=str(place),
                seconds_median=statistics.median(seconds[case]),
                ratio_to_floor=statistics.median(t / f for t, f in zip(seconds[case], floor, strict=True)),
                extra_bytes=extra[case],
                flops=flops[case],
            )
        )
        for case in CASES
    ]


def _count_flops(run: Callable[[], None]) -> int:
    """FLOPs of all matrix products, the accumulating in-place ones included, which the counter does not know."""

    def product(_: Any, left: tuple[int, int], right: tuple[int, int], **__: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    in_place = {torch.ops.aten.addmm_: product}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return int(counter.get_total_flops())


def _extra_bytes(run: Callable[[], None], place: torch.device) -> int:
    if place.type == CPU_NAME:
        return peak_extra_bytes(run)
    from megatron_kd.device.platform import peak_memory_bytes, reset_peak_memory

    reset_peak_memory()
    before = peak_memory_bytes()
    run()
    synchronize()
    return peak_memory_bytes() - before


_Inputs = tuple[Tensor, Tensor, TopKTargets, Tensor]


def _inputs(tokens: int, hidden: int, vocab: int, top_k: int, dtype: torch.dtype, place: torch.device) -> _Inputs:
    """Hidden states and head whose logits spread as those of trained models do, and targets that sum to 0.95."""
    generator = torch.Generator(device=place).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=place).to(dtype)
    head = (torch.randn(vocab, hidden, generator=generator, device=place) * 2 / hidden**0.5).to(dtype)
    # Any K distinct ids: a random start and a stride without common factors with the vocabulary.
    start = torch.randint(vocab, (tokens, 1), generator=generator, device=place)
    stride = max(1, vocab // top_k)
    ids = (start + stride * torch.arange(top_k, device=place)) % vocab
    scores = torch.randn(tokens, top_k, generator=generator, device=place).mul_(2).sort(dim=1, descending=True).values
    logprobs = torch.log_softmax(scores, dim=1) + torch.log(torch.tensor(0.95))
    tail = torch.full((tokens,), 0.05, device=place).log()
    targets = TopKTargets(ids.to(torch.int32), logprobs.to(torch.float16), tail)
    return states, head, targets, torch.ones(tokens)


def _pass(case: tuple[str, str], inputs: _Inputs, vocab: int, chunk_bytes: int) -> Callable[[], None]:
    states, head, targets, weights = inputs
    name, mode = case
    if name == "floor":

        def floor() -> None:
            logits = states @ head.t()
            _ = logits @ head
            _ = logits.t() @ states

        return floor

    method = IMPLEMENTATIONS[name].topk

    def run() -> None:
        x = states.detach().requires_grad_(mode != "no_grad")
        w = head.detach().requires_grad_(mode not in ("no_grad", "frozen_head"))
        out = method(x, w, targets, weights, vocab_size=vocab, mode=mode or "auto", chunk_bytes=chunk_bytes)
        if out.loss.requires_grad:
            out.loss.backward()

    return run


def table(results: list[dict[str, Any]]) -> str:
    """The results as lines of text."""
    lines = [f"{'implementation':<16} {'mode':<12} {'× floor':>8} {'seconds':>9} {'extra MiB':>10} {'GFLOP':>9}"]
    lines += [
        f"{r['implementation']:<16} {r['mode']:<12} {r['ratio_to_floor']:>8.2f} {r['seconds_median']:>9.3f} "
        f"{r['extra_bytes'] / 2**20:>10.1f} {r['flops'] / 1e9:>9.1f}"
        for r in results
    ]
    return "\n".join(lines)
