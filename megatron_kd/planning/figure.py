"""Plans side by side as stacked bars of memory per GPU, with the line that must not be passed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from megatron_kd.config import Recipe
from megatron_kd.pictures import FAINT, INK, style
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.memory import PARTS, Memory, plan_memory

# Okabe and Ito's palette, told apart with every common colour vision; bars and legend have one order.
COLOURS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "loss_workspace": "#D55E00",
    "teacher": "#CC79A7",
    "reserve": "#BBBBBB",
}
IMPLEMENTATIONS = ("dense", "forward_chunked", "fused")


def implementations(recipe: Recipe) -> list[tuple[str, Memory]]:
    """The recipe with each loss implementation, in its own layout."""
    found = []
    for name in IMPLEMENTATIONS:
        loss = recipe.loss.model_copy(update={"implementation": name})
        found.append((name.replace("_", "-"), plan_memory(recipe.model_copy(update={"loss": loss}))))
    return found


def draw_memory(plans: Sequence[tuple[str, Memory]]) -> bytes:
    """A PNG of plans under their names."""
    buffer = io.BytesIO()
    memory_figure(plans).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def memory_figure(plans: Sequence[tuple[str, Memory]]) -> Any:
    """The matplotlib figure behind ``draw_memory``. Raises ValueError where there is no plan."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not plans:
        raise ValueError("there are no plans to draw")
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(10.0, 1.9 + 0.62 * len(plans)), dpi=150, layout=engine)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style(axes, "Memory of the fullest GPU (GiB)")
    limit = plans[0][1].limit / GIB
    most = max(memory.total for _, memory in plans) / GIB
    right = 1.22 * (max(most, limit) if limit < float("inf") else most)
    drawn = [part for part in PARTS if any(memory.parts[part] for _, memory in plans)]
    for place, (_, memory) in enumerate(plans):
        start = 0.0
        for part in drawn:
            size = memory.parts[part] / GIB
            axes.barh(
                place,
                size,
                left=start,
                height=0.62,
                color=COLOURS[part],
                edgecolor="white",
                linewidth=0.8,
                label=part.replace("_", " ") if place == 0 else None,
            )
            if size > 0.05 * right:
                axes.text(start + size / 2, place, f"{size:.0f}", ha="center", va="center", fontsize=8, color="white")
            start += size
        verdict = "" if memory.fits else ", too much"
        axes.annotate(
            f"{start:.1f}{verdict}",
            (start, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
        )
    if limit < float("inf"):
        axes.axvline(limit, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
        axes.annotate(
            f"limit {limit:.1f}",
            (limit, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="bottom",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(plans)), [name for name, _ in plans])
    axes.set_ylim(len(plans) - 0.45, -0.55)
    axes.set_xlim(0, right)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=len(drawn), fontsize=9, frameon=False, labelcolor=INK)
    return figure
