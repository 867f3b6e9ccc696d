"""Work and memory: FLOP by what requires a gradient, bytes at the peak, the cut into chunks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.losses import IMPLEMENTATIONS, peak_extra_bytes
from megatron_kd.losses.geometry import plan_rows, row_blocks
from megatron_kd.losses.sizes import chunk_rows, moved_rows, tile_shape
from tests.unit.test_losses_oracle import Case, make_case, tiles


def call(case: Case, name: str, kind: str, wants: tuple[bool, bool], **kw: Any) -> None:
    hidden, weight = case.hidden.detach().requires_grad_(wants[0]), case.weight.detach().requires_grad_(wants[1])
    if kind == "topk":
        out = IMPLEMENTATIONS[name].topk(hidden, weight, case.targets, case.token_weights, **kw)
    else:
        teacher = (case.teacher_hidden, case.teacher_weight)
        out = IMPLEMENTATIONS[name].full(hidden, weight, *teacher, case.token_weights, **kw)
    if out.loss.requires_grad:
        out.loss.backward()


@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(
    ("mode", "wants", "projections", "teacher_projections"),
    [
        ("auto", (True, True), 3, 1),
        ("auto", (True, False), 2, 1),
        ("auto", (False, True), 2, 1),
        ("auto", (False, False), 1, 1),
        ("frozen_head", (True, False), 2, 1),
        ("no_grad", (True, True), 1, 1),
        ("recompute", (True, True), 4, 2),
        ("recompute", (True, False), 3, 2),
        ("recompute", (False, True), 3, 2),
        ("recompute", (False, False), 1, 1),
    ],
)
def test_no_work_is_done_for_what_needs_no_gradient(
    kind: str, mode: str, wants: tuple[bool, bool], projections: int, teacher_projections: int
) -> None:
    """P = 2·N·D·V over the rows that are not masked; padded vocabulary costs nothing."""
    case = make_case(tokens=12, padding=5, masked=(0, 5, 6, 7))
    expected = projections * 2 * 8 * 24 * 5
    if kind == "full":
        expected += teacher_projections * 2 * 8 * 24 * 7
    for divergence in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        with FlopCounterMode(display=False) as counter:
            call(case, "fused", kind, wants, mode=mode, vocab_size=24, chunk_bytes=5 * 24 * 8, divergence=divergence)
        assert counter.get_total_flops() == expected


@pytest.mark.parametrize(("mode", "projections"), [("recompute", 4), ("no_grad", 1)])
@pytest.mark.parametrize("kind", ["topk", "full"])
def test_tiles_do_no_more_work(kind: str, mode: str, projections: int) -> None:
    case = make_case(tokens=12, padding=5, masked=(0, 5, 6, 7))
    with FlopCounterMode(display=False) as counter, tiles():
        call(case, "fused", kind, (True, True), mode=mode, vocab_size=24, chunk_bytes=5 * 24 * 8)
    teacher = 0 if kind == "topk" else (2 if mode == "recompute" else 1) * 2 * 8 * 24 * 7
    assert counter.get_total_flops() == projections * 2 * 8 * 24 * 5 + teacher


def test_tiles_hold_the_buffer_whatever_rows_and_vocabulary_are() -> None:
    budget = 1 << 20
    peaks = []
    for tokens, vocab in ((512, 4096), (1024, 4096), (512, 8192)):
        case = make_case(tokens=tokens, size=8, vocab=vocab, top_k=4, padding=0, dtype=torch.float32)
        kw: dict[str, Any] = {"mode": "recompute", "vocab_size": vocab, "chunk_bytes": budget}

        def run(case: Case = case, kw: dict[str, Any] = kw) -> None:
            call(case, "fused", "topk", (True, True), **kw)

        with tiles():
            run()  # what is made once (none, today) is not counted
            peaks.append(peak_extra_bytes(run) - 4 * 8 * (tokens + vocab))
    per_token = 4 * 8 + 6 * 4 + 64
    assert all(peak < 1.5 * budget + 1024 * per_token for peak in peaks), peaks


@given(
    rows=st.integers(1, 1 << 20),
    vocab=st.integers(1, 1 << 18),
    width=st.sampled_from([4.0, 6.0, 8.0, 12.0]),
    budget=st.integers(1, 1 << 31),
)
def test_tile_shape(rows: int, vocab: int, width: float, budget: int) -> None:
    height, columns = tile_shape(rows, vocab, width, budget)
    assert 1 <= columns <= vocab and height >= 1
    smallest = min(128, vocab)
    assert height * columns * width <= max(budget, smallest * width)
    if vocab * width <= budget:
        whole = (chunk_rows(rows, vocab * width, budget), vocab)
        assert moved_rows(rows, vocab, height, columns) <= moved_rows(rows, vocab, *whole)


def test_tiles_of_a_long_context_move_a_fraction_of_the_bytes() -> None:
    """256K tokens, GPT-OSS's vocabulary on one GPU, 1 GiB: a tenth of what chunks of whole rows move."""
    rows, vocab, budget = 256 << 10, 201_088, 1 << 30
    shape = tile_shape(rows, vocab, 6.0, budget)
    assert shape[1] < vocab / 10 and shape[0] > 10_000
    whole = (chunk_rows(rows, vocab * 6, budget), vocab)
    assert moved_rows(rows, vocab, *shape) < 0.1 * moved_rows(rows, vocab, *whole)


@pytest.mark.parametrize(
    ("in_flight", "budget", "expected"),
    [(1, None, 3), (2, None, 4), (1, 1000, 4), (2, 1 << 20, 3), (4, 4 * 8 * (24 * 5 + 12 * 5), 3),
     (4, 4 * 8 * (24 * 5 + 12 * 5) - 1, 4)],
)  # fmt: skip
def test_auto_recomputes_where_a_single_pass_would_hold_too_much(
    in_flight: int, budget: int | None, expected: int
) -> None:
    """dH and dW of every microbatch in flight against the budget; FLOPs tell the mode."""
    case = make_case(tokens=12, padding=0)
    kw: dict[str, Any] = {"microbatches_in_flight": in_flight, "gradient_bytes": budget, "vocab_size": 24}
    with FlopCounterMode(display=False) as counter:
        call(case, "fused", "topk", (True, True), **kw)
    assert counter.get_total_flops() == expected * 2 * 12 * 24 * 5


@pytest.mark.parametrize("name", ["dense", "forward_chunked"])
def test_the_references_take_three_projections(name: str) -> None:
    case = make_case(tokens=12)
    with FlopCounterMode(display=False) as counter:
        call(case, name, "topk", (True, True), vocab_size=24, chunk_bytes=5 * 24 * 8)
    assert counter.get_total_flops() == 3 * 2 * 12 * 24 * 5


def peak(name: str, kind: str, tokens: int, **kw: Any) -> int:
    case = make_case(tokens=tokens, size=32, vocab=1024, top_k=20, padding=0, dtype=torch.float32)
    gc.collect()
    return peak_extra_bytes(lambda: call(case, name, kind, (True, True), vocab_size=1024, **kw))


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_order_of_the_peaks(kind: str) -> None:
    """Dense holds the logits several times, forward-chunked once, fused a chunk."""
    dense, chunked, fused, recompute = (
        peak(name, kind, 512, mode=mode, chunk_bytes=1 << 18)
        for name, mode in (
            ("dense", "auto"), ("forward_chunked", "auto"), ("fused", "single_pass"), ("fused", "recompute"),
        )
    )  # fmt: skip
    logits = 512 * 1024 * 4
    assert dense > 3 * logits
    assert dense > 1.5 * chunked
    assert chunked > logits > 2 * max(fused, recompute)


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
@pytest.mark.parametrize("masked_share", [0.0, 0.5])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_memory_per_token(mode: str, masked_share: float, divergence: str) -> None:
    """At most 4D + 6K + 64 bytes a token beside the fixed chunk and weight-gradient buffers (D = 32, K = 20)."""

    def measure(tokens: int) -> int:
        masked = tuple(range(int(tokens * masked_share)))
        case = make_case(tokens=tokens, size=32, vocab=64, top_k=20, padding=0, dtype=torch.float32, masked=masked)
        wants = (True, True)
        kw: dict[str, Any] = {"mode": mode, "vocab_size": 64, "chunk_bytes": 128 * 64 * 4}
        kw["divergence"] = divergence
        return peak_extra_bytes(lambda: call(case, "fused", "topk", wants, **kw))

    growth = (measure(8192) - measure(4096)) / 4096
    assert growth <= 4 * 32 + 6 * 20 + 64


def test_peak_extra_bytes_counts_what_is_alive_together() -> None:
    outside = torch.zeros(1000)

    def work() -> None:
        a = outside + 1  # 4000 bytes
        b = a.view(10, 100)[2:5]  # none
        c = torch.empty(500, dtype=torch.float64)  # 4000 bytes
        del a, c
        torch.mul(outside, 2, out=b.new_empty(1000))  # 4000 bytes, while b still holds the first 4000
        outside.add_(1)

    assert peak_extra_bytes(work) == 8000
    assert peak_extra_bytes(lambda: None) == 0


def test_peak_extra_bytes_sees_the_backward_pass() -> None:
    x = torch.ones(1000, requires_grad=True)
    # exp: 4000 kept; sum: 4; backward: ones 4, its expansion shares it, the product 4000.
    assert peak_extra_bytes(lambda: x.exp().sum().backward()) in range(8004, 8016)


@given(rows=st.integers(0, 10**6), width=st.integers(1, 10**6), budget=st.integers(1, 2**31))
def test_chunk_rows(rows: int, width: int, budget: int) -> None:
    step = chunk_rows(rows, width, budget)
    assert step >= 1
    assert step == 1 or step * width <= budget
    chunks = max(1, -(-rows // step))
    most = max(1, budget // width)
    most -= most % (128 if most >= 128 else 1)
    assert chunks <= max(1, -(-rows // most))  # rounding never adds a chunk
    assert step % 128 == 0 or most < 128
    assert rows - (chunks - 1) * step <= step


@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=24),
    slices=st.sampled_from([1, 2, 3]),
    step=st.integers(1, 9),
)
def test_plan_covers_every_valid_row_once(weights: list[float], slices: int, step: int) -> None:
    tokens = len(weights) - len(weights) % slices
    token_weights = torch.tensor(weights[:tokens])
    plan = plan_rows(token_weights, slices, torch.device("cpu"))
    rows: list[int] = []
    for start in range(0, plan.columns, step):
        columns = slice(start, min(start + step, plan.columns))
        chunk = plan.global_rows(columns, torch.device("cpu"))
        rows += chunk.tolist()
        for number, of_slice in enumerate(chunk.view(slices, -1)):
            local = plan.local_rows(columns, number)
            inside = torch.arange(plan.slice_tokens)[local] + number * plan.slice_tokens
            assert torch.equal(inside, of_slice)
    assert len(set(rows)) == len(rows)
    assert set(token_weights.nonzero()[:, 0].tolist()) <= set(rows)
    fullest = int((token_weights.view(slices, -1) != 0).sum(1).max()) if tokens else 0
    assert len(rows) == slices * fullest


def test_row_blocks_cover_the_chunk() -> None:
    parts = list(row_blocks(10, 1 << 21, torch.device("cpu")))
    assert [(p.start, p.stop) for p in parts] == [(0, 4), (4, 8), (8, 10)]
