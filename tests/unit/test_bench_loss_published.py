"""The published figures stand beside the measured ones of the same sizes, and nowhere else."""

from __future__ import annotations

from typing import Any

from megatron_kd.bench.loss import LossReport
from megatron_kd.bench.settings import PUBLISHED, SMALL, Setting

GIB = 2**30


def row(implementation: str, mode: str, tokens: int, seconds: float | None, extra: int | None) -> dict[str, Any]:
    return {
        "implementation": implementation,
        "mode": mode,
        "tokens": tokens,
        "hidden": 4096,
        "vocab": 128256,
        "top_k": 100,
        "device": "cuda:0",
        "seconds_median": seconds,
        "ratio_to_floor": seconds,
        "extra_bytes": extra,
        "flops": None if extra is None else 10**12,
    }


def at(*tokens: int) -> Setting:
    return Setting(tokens, PUBLISHED.hidden, PUBLISHED.vocab, PUBLISHED.top_k, PUBLISHED.dtype)


def test_measured_beside_published() -> None:
    n32, n256 = 32768, 262144
    rows = [
        row("floor", "", n32, 0.2, GIB),
        row("fused", "single_pass", n32, 0.25, 3 * GIB),
        row("fused", "recompute", n32, 0.5, 2 * GIB),
        row("fused", "no_grad", n32, 0.1, GIB),
        row("dense", "", n32, 1.0, 60 * GIB),
        row("fused", "recompute", n256, 4.0, 4 * GIB),
        row("forward_chunked", "", n256, 10.0, 126 * GIB),
        row("dense", "", n256, None, None),
    ]
    report = LossReport(at(n32, n256), rows, [])
    table = report.text().split("\n\n")[-1].splitlines()
    # Inputs: 2·D·(N + V) + N·(6K + 4) bytes, 1.25 and 3.13 GiB.
    assert [line.split() for line in table[2:]] == [
        ["32,768", "dense", "61.25", "85.2", "2.00"],
        ["32,768", "fused", "recompute", "3.25", "5.45", "1.00"],
        ["32,768", "fused", "single_pass", "4.25", "5.45", "0.50"],
        ["262,144", "dense", "out", "of", "memory", "out", "of", "memory"],
        ["262,144", "forward_chunked", "129.13", "134.2", "2.50", "3.30"],
        ["262,144", "fused", "recompute", "7.13", "11.6", "1.00", "1.00"],
    ]
    # Each figure under its own heading.
    assert table[1].split() == ["tokens", "implementation", "mode", "peak", "published", "time", "published"]
    assert table[6].index("134.2") + len("134.2") == table[1].index("published") + len("published")
    assert len(table[6]) == len(table[1])

    published = report.to_json()["published"]
    assert {(figure["implementation"], figure["tokens"]) for figure in published} == {
        ("dense", n32),
        ("fused", n32),
        ("dense", n256),
        ("forward_chunked", n256),
        ("fused", n256),
    }
    assert [figure["peak_gib"] for figure in published if figure["implementation"] == "dense"] == [85.2, None]


def test_sizes_without_a_published_figure() -> None:
    """At 8K tokens nothing is published, at other widths neither."""
    report = LossReport(at(8192), [row("fused", "recompute", 8192, 0.1, GIB)], [])
    assert set(report.to_json()) == {"results", "notes"}
    assert report.text().splitlines()[-1].split() == ["8,192", "fused", "recompute", "2.05", "1.00"]
    other = LossReport(SMALL, [row("fused", "recompute", 4096, 0.1, GIB)], [])
    assert set(other.to_json()) == {"results", "notes"} and "ublished" not in other.text()


def test_the_time_of_a_fused_loss_that_ran_out_of_memory_divides_nothing() -> None:
    rows = [row("fused", "recompute", 65536, None, None), row("fused", "single_pass", 65536, 0.1, GIB)]
    table = LossReport(at(65536), rows, []).text().splitlines()
    assert table[-2].split() == ["65,536", "fused", "recompute", "out", "of", "memory"]
    assert table[-1].split() == ["65,536", "fused", "single_pass", "2.52"]
