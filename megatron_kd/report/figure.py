"""The comparison as one picture: divergence over tokens and GPU-hours, step time, peak memory, cost of a target."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_kd.pictures import FAINT, INK, style
from megatron_kd.report.curves import heldout_curve, training_curve
from megatron_kd.report.palette import COLOURS
from megatron_kd.report.runs import RunRecord
from megatron_kd.report.summary import RunSummary, hours_name
from megatron_kd.report.target import Target
from megatron_kd.report.text import figure as significant
from megatron_kd.report.text import short_count

# Dashes and markers repeat what the colours say.
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 12.0


def draw_comparison(runs: Sequence[RunRecord], summaries: Sequence[RunSummary], target: Target) -> bytes:
    """A PNG of the runs. What a run did not record is left out; a panel without any figure says so."""
    buffer = io.BytesIO()
    comparison_figure(runs, summaries, target).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def comparison_figure(runs: Sequence[RunRecord], summaries: Sequence[RunSummary], target: Target) -> Figure:
    """The figure behind ``draw_comparison``.

    Above, the divergence over tokens and over GPU-hours; below, step time, memory and GPU-hours to the target.
    """
    names = [_wrapped(summary.label) for summary in summaries]
    lines = sum(name.count("\n") + 1 for name in names)
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.04, hspace=0.06)
    bars = max(1.5, 0.9 + 0.26 * lines)
    figure = Figure(figsize=(WIDTH, 4.6 + bars), dpi=150, layout=engine)
    FigureCanvasAgg(figure)
    panels: dict[str, Any] = figure.subplot_mosaic(
        [["tokens"] * 3 + ["hours"] * 3, ["time"] * 2 + ["memory"] * 2 + ["reach"] * 2], height_ratios=(3.6, bars)
    )
    unit = hours_name(runs)
    _draw_curves(panels["tokens"], runs, names, "tokens", "trained tokens")
    _draw_curves(panels["hours"], runs, names, "hours", f"{unit} of training steps")
    panels["tokens"].set_title("lines: training, points: held-out split", loc="right", fontsize=8, color="#777777")
    _draw_bars(panels["time"], names, [summary.step_time_s for summary in summaries], "Step time, median (s)")
    _draw_bars(panels["memory"], names, [summary.peak_memory_gib for summary in summaries], memory_title(runs), False)
    hours = [summary.gpu_hours_to_target for summary in summaries]
    _draw_bars(panels["reach"], names, hours, f"{unit[0].upper()}{unit[1:]} to {target.goal}", False, "not reached")
    handles, texts = panels["tokens"].get_legend_handles_labels()
    if handles:
        # As many columns as the longest text leaves room for, at about 13 characters an inch.
        columns = max(1, min(len(texts), int(WIDTH * 13 / (max(map(_line_length, texts)) + 8))))
        figure.legend(
            handles,
            texts,
            loc="outside lower left",
            ncols=columns,
            fontsize=9,
            frameon=False,
            labelcolor=INK,
        )
    return figure


def _draw_curves(axes: Any, runs: Sequence[RunRecord], names: Sequence[str], over: str, x_label: str) -> None:
    style(axes, f"Divergence over {'tokens' if over == 'tokens' else x_label.partition(' ')[0]}")
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel("KD loss (per token)", fontsize=9, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=over == "tokens"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    seen: list[float] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        marker = MARKERS[index % len(MARKERS)]
        line = {"color": colour, "linestyle": dash, "linewidth": 1.8}
        # Rings of falling size, so that equal points of several runs stay visible within each other.
        ring = {
            "marker": marker,
            "markersize": 9.0 - 1.6 * (index % 4),
            "markerfacecolor": "white",
            "markeredgewidth": 1.6,
        }
        trained, evaluated = training_curve(run), heldout_curve(run)
        values = trained.values if trained.over(over) else []
        held = evaluated.values if evaluated.over(over) else []
        if values:
            smooth = trained.smooth().values
            if smooth != values:
                axes.plot(trained.over(over), values, color=colour, linewidth=0.6, alpha=0.25)
            axes.plot(trained.over(over), smooth, **line)
        if held:
            axes.plot(
                evaluated.over(over), held, color=colour, linestyle="none", zorder=4 + index, clip_on=False, **ring
            )
        if values or held:
            axes.plot([], [], label=name, **(line if values else {"color": colour, "linestyle": "none"}), **ring)
        seen += [*values, *held]
    if not seen:
        _say_nothing(axes, "no training or evaluation figures yet" if over == "tokens" else "no step times recorded")
        return
    levels = baselines(runs)
    for baseline in levels:
        label = f"unigram model, held-out: {baseline:.2f}"
        axes.axhline(baseline, color="#777777", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1, label=label)
    axes.set_ylim(bottom=0.0, top=1.06 * max([*seen, *levels]))
    axes.margins(x=0.02)


def _draw_bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float | None],
    title: str,
    with_names: bool = True,
    missing: str = "not recorded",
) -> None:
    style(axes, title)
    axes.set_yticks(range(len(names)), names if with_names else [""] * len(names))
    margin = 0.6 if len(names) > 1 else 1.1  # a bar alone must not fill its panel
    axes.set_ylim(len(names) - 1 + margin, -margin)  # first run on top
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])  # every bar bears its figure
    known = [value for value in values if value is not None]
    if not known:
        axes.set_yticks([])
        _say_nothing(axes, missing)
        return
    axes.set_xlim(0, 1.3 * max(max(known), 1e-9))  # room for the figures behind the bars
    for index, value in enumerate(values):
        if value is not None:
            axes.barh(index, value, height=0.6, color=COLOURS[index % len(COLOURS)])
        text = missing if value is None else significant(value)
        axes.annotate(
            text, (value or 0.0, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )


def _say_nothing(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, color="#777777")
    axes.set_xticks([])
    axes.set_yticks([])


def baselines(runs: Sequence[RunRecord]) -> list[float]:
    """Held-out KD of the runs' unigram models, to two places: often one for all."""
    last = [run.evaluation_series("eval/unigram_kd")[1][-1:] for run in runs]
    return sorted({round(value, 2) for values in last for value in values})


def memory_title(runs: Sequence[RunRecord]) -> str:
    """On a GPU it is what tensors take, on the CPU all that the process holds, libraries included."""
    on_cpu = {run.setting("cluster.gpu") == "cpu" for run in runs}
    return f"Peak {'resident ' if on_cpu == {True} else ''}memory (GiB)"


def _wrapped(label: str) -> str:
    """Broken into at most three lines of 30 characters, after a comma where there is one, else after a slash, _ or -.

    Of what is longer the beginning and the end, which tell runs apart.
    """
    if len(label) > 75:
        label = f"{label[:40]}… {label[-33:]}"
    lines = [""]
    for part in re.findall(r".*?, |.+", label):
        pieces = [part] if len(part) <= 30 else re.findall(r"[^/_ -]{1,30}[/_ -]?|[/_ -]", part)
        for piece in pieces:
            if len((lines[-1] + piece).rstrip()) > 30:
                lines.append("")
            lines[-1] += piece
    lines = [line.rstrip() for line in lines if line]
    return "\n".join(lines if len(lines) <= 3 else [*lines[:2], f"…{lines[-1][-29:]}"])


def _line_length(text: str) -> int:
    return max(len(line) for line in text.splitlines())
