"""Benchmarks on a GPU: bytes by its allocator, out of memory as a row, Liger where it is installed, a capture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_kd.bench import peers
from megatron_kd.bench.inputs import make_inputs
from megatron_kd.bench.loss import bench_loss
from megatron_kd.bench.memory import pool_growths, release_memory
from megatron_kd.bench.settings import PUBLISHED, choose_device, choose_setting
from megatron_kd.device import select_device
from tests.assets import megatron_kd, succeed, tiny_recipe

LIGER = importlib.util.find_spec("liger_kernel") is not None


def test_without_sizes_the_published_toy_is_measured() -> None:
    assert choose_device("auto") == "cuda"
    setting = choose_setting(tokens=None, hidden=None, vocab=None, top_k=None, dtype=None, published=False, on_gpu=True)
    assert setting == PUBLISHED


def test_rows_on_a_gpu() -> None:
    n, d, v, k = 4096, 256, 32768, 100
    report = bench_loss(
        tokens=[n], hidden=d, vocab=v, top_k=k, dtype="bf16", chunk_mib=32, device="cuda", rounds=2, show_progress=False
    )
    rows = {(row["implementation"], row["mode"]): row for row in report.results}
    assert not [note for note in report.notes if "failed" in note]
    projections = {case: row["flops"] / (2 * n * d * v) for case, row in rows.items()}
    assert (
        projections.items()
        >= {
            ("floor", ""): 3.0,
            ("fused", "single_pass"): 3.0,
            ("fused", "recompute"): 4.0,
            ("fused", "frozen_head"): 2.0,
            ("fused", "no_grad"): 1.0,
            ("megatron_lm_topk", ""): 3.0,
        }.items()
    )
    assert projections.get(("liger_jsd", "")) == (4.0 if LIGER else None)
    assert rows["fused", "single_pass"]["extra_bytes"] < 2 * n * v < rows["dense", ""]["extra_bytes"]
    assert all(row["device"].startswith("cuda") and row["seconds_median"] > 0 for row in rows.values())


def test_dense_runs_out_of_memory_and_the_fused_loss_does_not() -> None:
    """Tokens so many that [N, V] in float32 is larger than the GPU."""
    v = 128256
    total = torch.cuda.get_device_properties(0).total_memory
    n = -(-total // (4 * v))
    report = bench_loss(
        tokens=[n], hidden=64, vocab=v, top_k=10, dtype="bf16", device="cuda", rounds=1, show_progress=False
    )
    rows = {(row["implementation"], row["mode"]): row for row in report.results}
    for name in ("dense", "forward_chunked"):
        assert rows[name, ""]["seconds_median"] is rows[name, ""]["extra_bytes"] is None
    for mode in ("single_pass", "recompute"):
        assert rows["fused", mode]["extra_bytes"] < total / 10


def test_a_pool_that_grows_is_seen() -> None:
    place = select_device("cuda")
    torch.ones(1, device=place)
    release_memory(place)
    before = pool_growths(place)
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=place)
    assert pool_growths(place) > before
    again = pool_growths(place)
    del kept
    kept = torch.empty(1 << 30, dtype=torch.uint8, device=place)
    assert pool_growths(place) == again, "from the pool"
    del kept
    release_memory(place)
    torch.empty(1 << 30, dtype=torch.uint8, device=place)
    assert pool_growths(place) > again


@pytest.mark.skipif(not LIGER, reason="liger-kernel is not installed")
def test_liger_is_called_right() -> None:
    """Against the mean generalised JSD (β = 0.5) of the two distributions in float64."""
    place = select_device("cuda")
    inputs = make_inputs(64, 32, 500, 8, torch.float32, place)
    hidden, head = inputs.hidden.clone().requires_grad_(), inputs.head.clone().requires_grad_()
    value = peers.liger_jsd(inputs)(hidden, head)
    value.backward()
    log_q = torch.log_softmax(inputs.hidden.double() @ inputs.head.double().t(), dim=1)
    teacher = inputs.hidden.roll(1, dims=0).double() @ inputs.head.roll(1, dims=0).double().t()
    log_p = torch.log_softmax(teacher, dim=1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    expected = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(dim=1).mean()
    torch.testing.assert_close(value.double(), expected, rtol=1e-2, atol=0)  # its GEMMs may take TF32
    assert hidden.grad is not None and head.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.parametrize("engine", ["megatron", "hf"])
def test_a_capture_beside_the_bare_forward(tmp_path: Path, engine: str) -> None:
    recipe = tiny_recipe(tmp_path, cluster={"gpu": "h200"}, training={"precision": "bf16"}, teacher={"engine": engine})
    done = succeed(megatron_kd("bench", "capture", recipe, "--rows", "3", "--json"))
    (row,) = json.loads(done.stdout)["results"]
    assert (row["clock"], row["engine"], row["dtype"], row["rounds"]) == ("wall", engine, "bf16", 3)
    assert row["device"] != "cpu" and all(value > 0 for value in row["us_per_token"].values())
