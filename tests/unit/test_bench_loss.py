"""``bench loss``: what it counts is right, and its rows have the promised keys."""

from __future__ import annotations

import pytest

from megatron_kd.bench.loss import bench_loss, table
from megatron_kd.errors import ConfigError

N, D, V, K = 96, 16, 640, 8
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


def test_counts_of_every_case() -> None:
    results = bench_loss(tokens=N, hidden=D, vocab=V, top_k=K, chunk_mib=0.05, rounds=1, show_progress=False)
    by_case = {(r["implementation"], r["mode"]): r for r in results}
    assert all(set(r) == KEYS for r in results)
    projection = 2 * N * D * V
    projections = {
        ("floor", ""): 3,
        ("fused", "single_pass"): 3,
        ("fused", "frozen_head"): 2,
        ("fused", "recompute"): 4,
        ("fused", "no_grad"): 1,
        ("forward_chunked", ""): 3,
        ("dense", ""): 3,
    }
    assert {case: r["flops"] / projection for case, r in by_case.items()} == projections
    assert by_case["floor", ""]["ratio_to_floor"] == 1.0
    extra = {case: r["extra_bytes"] for case, r in by_case.items()}
    assert extra["dense", ""] > extra["forward_chunked", ""] > extra["fused", "single_pass"]
    assert extra["forward_chunked", ""] > 4 * N * V > extra["fused", "single_pass"]
    assert len(table(results).splitlines()) == len(results) + 1


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [({"top_k": V + 1}, "at most vocab"), ({"tokens": 0}, "positive"), ({"dtype": "fp8"}, "fp32, bf16")],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], pattern: str) -> None:
    sizes = {"tokens": N, "hidden": D, "vocab": V, "top_k": K, **changes}
    with pytest.raises(ConfigError, match=pattern):
        bench_loss(**sizes, show_progress=False)  # type: ignore[arg-type]
