"""The rows of ``bench loss`` as one picture: time beside the floor, memory over the number of tokens.

Takes the rows as they stand in the JSON, so that a picture can be drawn of an earlier run; imports no torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_kd.pictures import FAINT, INK, style

Row = Mapping[str, Any]
Name = tuple[str, str]

# Okabe and Ito's palette, told apart with every common colour vision; dashes and markers repeat the distinction.
COLOURS = {
    "fused": "#0072B2",
    "dense": "#D55E00",
    "forward_chunked": "#009E73",
    "megatron_lm_topk": "#CC79A7",
    "torch_linear_cross_entropy": "#000000",
    "liger_jsd": "#E69F00",
    "floor": "#777777",
}
DASHES: dict[str, Any] = {
    "recompute": (0, (5, 2)),
    "frozen_head": (0, (1.5, 1.5)),
    "no_grad": (0, (7, 2, 1.5, 2)),
}
MARKERS = {"fused": "o", "dense": "s", "forward_chunked": "^", "megatron_lm_topk": "D", "liger_jsd": "P"}
OUT_OF_MEMORY = "out of memory"


def draw_loss_benchmark(results: Sequence[Row]) -> bytes:
    """A PNG of the rows (``results`` of the JSON).

    Raises:
        ValueError: there is no row.
    """
    buffer = io.BytesIO()
    loss_benchmark_figure(results).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def loss_benchmark_figure(results: Sequence[Row]) -> Any:
    """The matplotlib figure behind ``draw_loss_benchmark``.

    Times are those of one token number: the largest of those at which the most cases ran. Memory is drawn over all
    token numbers, or as bars where there is one only.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not results:
        raise ValueError("there are no results to draw")
    numbers = sorted({row["tokens"] for row in results})
    at = max(numbers, key=lambda tokens: (_measured(results, tokens), tokens))
    rows = {_name(row): row for row in results if row["tokens"] == at}
    sweep = len(numbers) > 1
    height = max(4.2, 1.6 + 0.36 * len(rows) + 0.9 * sweep)
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.05)
    figure = Figure(figsize=(11.0, height), dpi=150, layout=engine)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15 if sweep else 0.8), sharey=not sweep)
    _draw_times(left, rows, at)
    if sweep:
        _draw_memory(right, results, numbers)
        handles, texts = right.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=4, fontsize=9, frameon=False, labelcolor=INK)
    else:
        _draw_memory_bars(right, rows, at)
    return figure


def _name(row: Row) -> Name:
    return row["implementation"], row["mode"]


def _measured(results: Sequence[Row], tokens: int) -> int:
    return sum(row["tokens"] == tokens and row["seconds_median"] is not None for row in results)


def _label(name: Name) -> str:
    if name[0] == "floor":
        return "three bare GEMMs"
    return f"{name[0]}, {name[1]}" if name[1] else name[0]


def _colour(name: Name) -> str:
    """The implementation's, half mixed with white for its lesser modes."""
    colour = COLOURS.get(name[0], INK)
    if name[1] not in DASHES:
        return colour
    return "#" + "".join(f"{(int(colour[place : place + 2], 16) + 255) // 2:02X}" for place in (1, 3, 5))


def _draw_times(axes: Any, rows: Mapping[Name, Row], tokens: int) -> None:
    style(axes, f"Time, × three bare GEMMs ({_count(tokens)} tokens)")
    times = [(name, row["ratio_to_floor"]) for name, row in rows.items()]
    _bars(axes, times, lambda value: f"{value:.2f}")
    axes.axvline(1.0, color=INK, linewidth=1.0, linestyle=(0, (2, 2)), zorder=3)


def _draw_memory_bars(axes: Any, rows: Mapping[Name, Row], tokens: int) -> None:
    style(axes, f"Extra memory ({_count(tokens)} tokens)")
    _bars(axes, [(name, row["extra_bytes"]) for name, row in rows.items()], _bytes)
    axes.tick_params(axis="y", labelleft=False)


def _bars(axes: Any, values: Sequence[tuple[Name, float | None]], show: Any) -> None:
    """Horizontal bars from top to bottom, each with its figure behind it."""
    known = [value for _, value in values if value is not None]
    axes.set_yticks(range(len(values)), [_label(name) for name, _ in values])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_xlim(0, 1.25 * max(known, default=1.0))
    for index, (name, value) in enumerate(values):
        if value is not None:
            axes.barh(index, value, height=0.65, color=_colour(name))
        axes.annotate(
            OUT_OF_MEMORY if value is None else show(value),
            (value or 0.0, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )


def _draw_memory(axes: Any, results: Sequence[Row], numbers: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    style(axes, "Extra memory over tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    axes.set_xlabel("tokens", fontsize=9, color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    for name in dict.fromkeys(map(_name, results)):
        points = sorted(
            (row["tokens"], row["extra_bytes"]) for row in results if _name(row) == name and row["extra_bytes"]
        )
        failed = [row["tokens"] for row in results if _name(row) == name and not row["extra_bytes"]]
        colour = _colour(name)
        axes.plot(
            [tokens for tokens, _ in points],
            [size for _, size in points],
            label=_label(name),
            color=colour,
            linestyle=DASHES.get(name[1], "solid"),
            linewidth=1.8,
            marker=MARKERS.get(name[0], "v"),
            markersize=5 if name[1] in DASHES else 7,
            markerfacecolor="white" if name[1] in DASHES else colour,
        )
        if points and failed and max(failed) > points[-1][0]:
            axes.annotate(
                f"then {OUT_OF_MEMORY}",
                points[-1],
                xytext=(6, 3),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xticks(numbers, [_count(tokens) for tokens in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _bytes(size)))


def _count(tokens: int) -> str:
    """K stands for 1,024, as in a context of 128K."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _bytes(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} bytes"
