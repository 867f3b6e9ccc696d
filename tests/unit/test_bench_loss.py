"""``bench loss``: what it counts is right, its rows have the promised keys, and failures become results or notes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from megatron_kd.bench.cases import Case, Pass, floor_pass, floor_rows
from megatron_kd.bench.inputs import make_inputs
from megatron_kd.bench.loss import LossReport, bench_loss, rows_of
from megatron_kd.bench.measure import OUT_OF_MEMORY, Measurement, count_flops, extra_bytes, measure
from megatron_kd.bench.memory import bounded_host_memory, is_out_of_memory
from megatron_kd.bench.neighbours import Neighbours
from megatron_kd.bench.peers import available_peers
from megatron_kd.bench.settings import (
    PUBLISHED,
    SMALL,
    Setting,
    choose_device,
    choose_setting,
    parse_tokens,
)
from megatron_kd.errors import ConfigError

N, D, V, K = 96, 16, 640, 8
SIZES: dict[str, Any] = {"hidden": D, "vocab": V, "top_k": K}
CPU = torch.device("cpu")
KEYS = {
    "implementation",
    "mode",
    "tokens",
    "hidden",
    "vocab",
    "top_k",
    "device",
    "seconds_median",
    "ratio_to_floor",
    "extra_bytes",
    "flops",
}
OURS = {"floor", "fused", "forward_chunked", "dense"}
PROJECTIONS = {  # in the order of the rows
    ("floor", ""): 3,
    ("fused", "single_pass"): 3,
    ("fused", "recompute"): 4,
    ("fused", "frozen_head"): 2,
    ("fused", "no_grad"): 1,
    ("forward_chunked", ""): 3,
    ("dense", ""): 3,
    ("megatron_lm_topk", ""): 3,
    ("torch_linear_cross_entropy", ""): 3,
}


@pytest.fixture(scope="module")
def report() -> LossReport:
    return bench_loss(tokens=[N, 2 * N], **SIZES, chunk_mib=0.05, rounds=2, threads=1, show_progress=False)


def expected_projections() -> dict[tuple[str, str], int]:
    """Of the cases that run here: torch before 2.13 has no linear_cross_entropy."""
    peers = {peer.name for peer in available_peers(CPU)[0]}
    assert "megatron_lm_topk" in peers, "Megatron-Core's wheel has it"
    return {name: count for name, count in PROJECTIONS.items() if name[0] in OURS | peers}


def test_rows_and_counted_flops(report: LossReport) -> None:
    assert all(set(row) == KEYS for row in report.results)
    for tokens in (N, 2 * N):
        rows = {(row["implementation"], row["mode"]): row for row in report.results if row["tokens"] == tokens}
        assert {case: row["flops"] / (2 * tokens * D * V) for case, row in rows.items()} == expected_projections()
        assert rows["floor", ""]["ratio_to_floor"] == 1.0
        assert all(row["seconds_median"] > 0 and row["ratio_to_floor"] > 0 for row in rows.values())
        assert {row["device"] for row in rows.values()} == {"cpu"}


def test_counted_bytes(report: LossReport) -> None:
    """Each above the one that holds less of [N, V]; the fused modes grow with N by a few words a token only."""
    extra = {(row["implementation"], row["mode"], row["tokens"]): row["extra_bytes"] for row in report.results}
    gradients = 4 * D * (V + N)
    assert extra["floor", "", N] == 4 * N * V + gradients
    assert extra["dense", "", N] > extra["forward_chunked", "", N] > 4 * N * V > extra["fused", "single_pass", N]
    assert extra["fused", "single_pass", N] < gradients + 2 * 0.05 * 2**20
    for mode in ("single_pass", "recompute", "frozen_head", "no_grad"):
        assert extra["fused", mode, 2 * N] - extra["fused", mode, N] < N * (4 * D + 6 * K + 64)
    # Beside the logits it makes their shift, their exponentials, and log-probabilities.
    assert extra["megatron_lm_topk", "", N] >= 3 * 4 * N * V


def test_the_report_in_both_forms(report: LossReport) -> None:
    value = report.to_json()
    assert set(value) == {"results", "notes"} and value["results"] is report.results
    tables = report.text().split("\n\n")
    assert [table.splitlines()[0] for table in tables] == [
        f"{n} tokens, hidden 16, vocabulary 640, top 8, fp32, cpu" for n in (N, 2 * N)
    ]
    for table in tables:
        assert [line.split()[0] for line in table.splitlines()[2:]] == [name for name, _ in expected_projections()]


def test_notes(report: LossReport) -> None:
    """Who was left out, and what else a peer was given, at the most tokens."""
    dense_targets = [note for note in report.notes if note.startswith("torch_linear_cross_entropy: ")]
    if ("torch_linear_cross_entropy", "") in expected_projections():
        (note,) = dense_targets
        assert "float32 probabilities [N, V] are inputs of it, which extra_bytes does not count" in note
        assert note.endswith(f": {4 * 2 * N * V / 2**20:,.1f} MiB at {2 * N:,} tokens")
    (left_out,) = (note for note in report.notes if note.startswith("liger_jsd"))
    assert left_out.startswith("liger_jsd is left out: ")


def test_bfloat16_is_measured() -> None:
    report = bench_loss(tokens=[N], **SIZES, dtype="bf16", chunk_mib=0.05, rounds=1, show_progress=False)
    assert [row["seconds_median"] is not None for row in report.results] == [True] * len(expected_projections())
    assert not [note for note in report.notes if "failed" in note]
    assert report.text().splitlines()[0].endswith("top 8, bf16, cpu")


def test_neighbours_are_counted_and_noted() -> None:
    """A process of our own making that does nothing but count keeps a share of a core, and this one is left out."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            seen = Neighbours()
            time.sleep(1.0)
            assert seen.cores() > 0.2
            (note,) = seen.notes(threads=os.cpu_count() or 1)
            assert "do not trust the times" in note
            assert seen.notes(threads=-1000) == []
        finally:
            other.kill()


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    bench_loss(tokens=[4], hidden=4, vocab=32, top_k=2, rounds=1, threads=before + 1, show_progress=False)
    assert torch.get_num_threads() == before


def run_nothing() -> None:
    return None


def run_out_of_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def run_into_an_error() -> None:
    raise RuntimeError("expected\n  another shape")


def case(name: str, run: Pass, peer: bool = False) -> Case:
    return Case(name, "", lambda: run, peer=peer)


def no_bar(units: float = 1, note: str = "") -> None:
    return None


def test_out_of_memory_is_a_row_and_a_failed_peer_a_note() -> None:
    inputs = make_inputs(N, D, V, K, torch.float32, CPU)
    cases = [
        case("floor", floor_pass(inputs)),
        case("dense", run_out_of_memory),
        case("other", run_into_an_error, peer=True),
        case("large", run_out_of_memory, peer=True),
    ]
    found = measure(cases, 2, CPU, no_bar)
    assert [seen.failure for seen in found[1:]] == [
        OUT_OF_MEMORY,
        "RuntimeError: expected another shape",
        OUT_OF_MEMORY,
    ]
    setting = Setting((N,), D, V, K, "fp32")
    rows, notes = rows_of(cases, found, setting, N, CPU)
    assert notes == [f"other failed at {N} tokens: RuntimeError: expected another shape"]
    assert [row["implementation"] for row in rows] == ["floor", "dense", "large"]
    for row in rows[1:]:
        assert set(row) == KEYS
        assert row["seconds_median"] is row["ratio_to_floor"] is row["extra_bytes"] is row["flops"] is None
    text = LossReport(setting, rows, notes).text().splitlines()
    assert text[3].split() == ["dense", "out", "of", "memory"] and text[2].split()[:2] == ["floor", "1.00"]


def test_memory_that_gives_out_in_a_later_round() -> None:
    calls: list[None] = []

    def run() -> None:
        calls.append(None)
        if len(calls) > 3:  # the two counting passes and the first round
            run_out_of_memory()

    (seen,) = measure([case("dense", run)], 3, CPU, no_bar)
    assert len(calls) == 4, "left out of the third round"
    assert (seen.failure, seen.seconds_median, seen.extra_bytes, seen.flops) == (OUT_OF_MEMORY, None, None, 0)
    floor = Measurement(seconds=[1.0])
    assert seen.ratio_to(floor) is floor.ratio_to(seen) is None


def test_our_own_errors_are_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="another shape"):
        measure([case("dense", run_into_an_error)], 1, CPU, no_bar)


def test_ratios_are_taken_round_by_round() -> None:
    """A load that slows a whole round changes no ratio, where the ratio of the medians would move."""
    floor, own = Measurement(seconds=[1.0, 10.0, 2.0]), Measurement(seconds=[1.5, 15.0, 8.0])
    assert own.ratio_to(floor) == 1.5 and own.seconds_median == 8.0


def test_every_pass_is_prepared_anew_and_outside_of_what_is_counted() -> None:
    alive: list[torch.Tensor] = []

    def prepare() -> Pass:
        alive[:] = [torch.ones(1000)]

        def run() -> None:
            alive[0].add(1).sum()

        return run

    (seen,) = measure([Case("peer", "", prepare, peer=True)], 3, CPU, no_bar)
    assert seen.failure is None and seen.extra_bytes == 4 * 1000 + 4 and len(seen.seconds) == 3


def test_the_floor_in_slices_is_the_floor() -> None:
    """Three slices: the same FLOPs and results, a third of the logits."""
    inputs = make_inputs(N, D, V, K, torch.float32, CPU)
    whole, sliced = floor_pass(inputs), floor_pass(inputs, slice_bytes=4 * V * N // 3)
    assert floor_rows(N, V, 4, 4 * V * N // 3) == N // 3 and floor_rows(N, V, 4) == N
    assert count_flops(whole) == count_flops(sliced) == 3 * 2 * N * D * V
    assert extra_bytes(sliced, CPU) <= extra_bytes(whole, CPU) - 4 * V * N // 3
    assert floor_rows(262144, 128256, 2) == 262144 // 16, "of 64 GiB of logits"


def test_memory_is_bounded_and_the_bound_lifted() -> None:
    with bounded_host_memory(64 << 20):
        # More than the allocator may have lying about from earlier work of this process.
        with pytest.raises(RuntimeError) as caught:
            torch.empty(8 << 30, dtype=torch.uint8)
        assert is_out_of_memory(caught.value)
    assert torch.empty(256 << 20, dtype=torch.uint8).numel() == 256 << 20


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 62.62 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_inputs_have_distinct_ids_and_a_mass_of_one() -> None:
    inputs = make_inputs(50, 4, 37, 7, torch.bfloat16, CPU)
    ids = inputs.targets.ids
    assert ids.min() >= 0 and ids.max() < 37 and all(len(set(row)) == 7 for row in ids.tolist())
    mass = inputs.targets.logprobs.double().exp().sum(dim=1) + inputs.targets.tail_logmass.double().exp()
    torch.testing.assert_close(mass, torch.ones(50, dtype=torch.float64), rtol=0, atol=2e-3)
    assert (inputs.tokens, inputs.vocab) == (50, 37) and inputs.hidden.dtype == inputs.head.dtype == torch.bfloat16
    seen = sum(
        t.nbytes for t in (inputs.hidden, inputs.head, ids, inputs.targets.logprobs, inputs.targets.tail_logmass)
    )
    assert seen == Setting((50,), 4, 37, 7, "bf16").input_bytes(50)


def test_sizes_come_from_a_preset() -> None:
    def chosen(published: bool = False, on_gpu: bool = False, **given: Any) -> Setting:
        nothing: dict[str, Any] = dict.fromkeys(("tokens", "hidden", "vocab", "top_k", "dtype"))
        return choose_setting(**{**nothing, **given}, published=published, on_gpu=on_gpu)

    assert chosen() == SMALL and chosen(on_gpu=True) == PUBLISHED == chosen(published=True)
    assert chosen(on_gpu=True, dtype="bf16").hidden == SMALL.hidden
    assert chosen(published=True, tokens=[32768]) == Setting((32768,), 4096, 128256, 100, "bf16")
    assert PUBLISHED.tokens == (8192, 16384, 32768, 65536, 131072, 262144)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"top_k": V + 1}, "top-k is 641, must be at most vocab, 640"),
        ({"tokens": [N, 0]}, "tokens is 0, must be positive"),
        ({"tokens": []}, "no token number"),
        ({"hidden": -1}, "hidden is -1, must be positive"),
        ({"dtype": "fp8"}, "dtype is 'fp8', must be one of fp32, bf16"),
        ({"device": "tpu"}, "device is 'tpu', must be one of auto, cpu, cuda"),
        ({"rounds": 0}, "rounds is 0, must be positive"),
        ({"threads": 0}, "threads is 0, must be positive"),
        ({"chunk_mib": 0.0}, "chunk-mib is 0.0, must be positive"),
        ({"chunk_mib": float("nan")}, "chunk-mib is nan, must be positive"),
        ({"chunk_mib": float("inf")}, "chunk-mib is inf, must be a finite number of MiB and at least a byte"),
        ({"chunk_mib": 1e-9}, "chunk-mib is 1e-09, must be a finite number of MiB and at least a byte"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], pattern: str) -> None:
    sizes = {"tokens": [N], **SIZES, **changes}
    with pytest.raises(ConfigError, match=pattern):
        bench_loss(**sizes, show_progress=False)


def test_token_numbers() -> None:
    assert parse_tokens(None, None) is None and parse_tokens(7, None) == [7]
    assert parse_tokens(None, "2048, 1024,2048") == [1024, 2048]
    with pytest.raises(ConfigError, match="either --tokens or --sweep-tokens"):
        parse_tokens(7, "1024")
    for text in ("1024;2048", "8K", ""):
        with pytest.raises(ConfigError, match="must be whole numbers with commas"):
            parse_tokens(None, text)


def test_the_device() -> None:
    assert choose_device("cpu") == "cpu"
    if not torch.accelerator.is_available():
        assert choose_device("auto") == "cpu"
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            choose_device("cuda")
