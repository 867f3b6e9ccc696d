"""The rows of ``cache fidelity`` as one picture: KL and gradient error over K, both axes logarithmic.

Takes the JSON, so that a picture can be drawn of an earlier measurement; imports no torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_kd.pictures import FAINT, INK, style

# Okabe and Ito's palette, told apart with every common colour vision; markers repeat the distinction.
COLOURS = {
    "bucket": "#0072B2",
    "truncate": "#D55E00",
    "renormalize_teacher": "#009E73",
    "renormalize_both": "#CC79A7",
}
MARKERS = {
    "bucket": "o",
    "truncate": "^",
    "renormalize_teacher": "s",
    "renormalize_both": "D",
}
DASHES: dict[str, Any] = {"float32": "solid", "float16": (0, (5, 2)), "bfloat16": (0, (1.5, 1.5))}


def draw_fidelity(found: Mapping[str, Any]) -> bytes:
    """A PNG of a measurement (the JSON of ``cache fidelity``)."""
    buffer = io.BytesIO()
    fidelity_figure(found).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def fidelity_figure(found: Mapping[str, Any]) -> Any:
    """The matplotlib figure behind ``draw_fidelity``.

    The KL of the bucket (it is infinite for tails that drop the mass outside the top K) and the gradient error by
    tail, both with the recipe's value dtype; and the part of that error which is rounding, by value dtype. A bucket by
    subtraction differs too little here to be seen.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.05)
    figure = Figure(figsize=(14.0, 4.8), dpi=150, layout=engine)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    value_dtype = found["value_dtype"]
    _draw(panels[0], found, "kl", "KL(dense ‖ stored), nats per token", [("bucket", value_dtype)])
    tails = [(tail, value_dtype) for tail in COLOURS]
    _draw(panels[1], found, "gradient_error", "Gradient error, relative", tails)
    rounding = [("bucket", dtype) for dtype in DASHES]
    _draw(panels[2], found, "rounding_error", "The part of it that is rounding", rounding)
    return figure


def _draw(axes: Any, found: Mapping[str, Any], key: str, title: str, curves: Sequence[tuple[str, str]]) -> None:
    """One panel with the curves of some (tail, value dtype), a legend below it."""
    style(axes, title)
    axes.grid(color=FAINT, linewidth=0.8)
    for tail, dtype in curves:
        points = [
            (row["top_k"], row[key])
            for row in found["results"]
            if (row["tail"], row["value_dtype"]) == (tail, dtype) and row[key]
        ]
        axes.plot(
            [k for k, _ in points],
            [value for _, value in points],
            label=f"{tail.replace('_', ' ')}, {dtype}",
            color=COLOURS[tail],
            linestyle=DASHES[dtype],
            linewidth=1.8,
            marker=MARKERS[tail],
            markersize=5,
            markerfacecolor=COLOURS[tail] if dtype == "float32" else "white",
        )
    axes.axvline(found["top_k"], color="#777777", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"K (dashed: {found['top_k']}, the recipe's)", fontsize=9, color=INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8, frameon=False, labelcolor=INK)
