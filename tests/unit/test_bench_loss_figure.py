"""The picture of ``bench loss`` shows the rows it is given: read back from the figure's own artists."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megatron_kd.bench.figure import draw_loss_benchmark, loss_benchmark_figure
from tests.assets import ROOT, environment

MIB = 2**20


def row(implementation: str, mode: str, tokens: int, ratio: float | None, extra: int | None) -> dict[str, Any]:
    return {
        "implementation": implementation,
        "mode": mode,
        "tokens": tokens,
        "seconds_median": ratio,
        "ratio_to_floor": ratio,
        "extra_bytes": extra,
    }


SWEEP = [
    row("floor", "", 1024, 1.0, 64 * MIB),
    row("fused", "single_pass", 1024, 1.1, 8 * MIB),
    row("dense", "", 1024, 2.5, 300 * MIB),
    row("floor", "", 4096, 1.0, 256 * MIB),
    row("fused", "single_pass", 4096, 1.2, 9 * MIB),
    row("dense", "", 4096, 2.7, 1200 * MIB),
    row("floor", "", 16384, 1.0, 1024 * MIB),
    row("fused", "single_pass", 16384, 1.3, 12 * MIB),
    row("dense", "", 16384, None, None),
]


def bars(axes: Any) -> list[float]:
    return [round(patch.get_width(), 3) for patch in axes.patches]


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_sweep() -> None:
    """Times of the most tokens at which all ran; memory over all, ending where it gave out."""
    times, memory = loss_benchmark_figure(SWEEP).axes
    assert "(4K tokens)" in times.get_title(loc="left") and bars(times) == [1.0, 1.2, 2.7]
    assert [label.get_text() for label in times.get_yticklabels()] == [
        "three bare GEMMs",
        "fused, single_pass",
        "dense",
    ]
    assert words(times) == ["1.00", "1.20", "2.70"]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in memory.get_lines()}
    assert lines["dense"] == ([1024, 4096], [300 * MIB, 1200 * MIB])
    assert lines["fused, single_pass"] == ([1024, 4096, 16384], [8 * MIB, 9 * MIB, 12 * MIB])
    assert words(memory) == ["then out of memory"]
    assert (memory.get_xscale(), memory.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in memory.get_xticklabels()] == ["1K", "4K", "16K"]


def test_one_number_of_tokens() -> None:
    times, memory = loss_benchmark_figure(SWEEP[6:]).axes
    assert bars(times) == [1.0, 1.3] and words(times) == ["1.00", "1.30", "out of memory"]
    assert bars(memory) == [1024 * MIB, 12 * MIB] and words(memory) == ["1 GiB", "12 MiB", "out of memory"]


def test_the_picture_is_a_png_and_the_same_each_time() -> None:
    first = draw_loss_benchmark(SWEEP)
    assert first.startswith(b"\x89PNG") and first == draw_loss_benchmark(SWEEP)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no results"):
        draw_loss_benchmark([])


def test_no_torch_is_needed() -> None:
    code = "import sys, megatron_kd.bench.figure; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"
