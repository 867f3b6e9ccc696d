"""How every picture of the project looks: one ink, faint grids, no frame, a bold title on the left."""

from __future__ import annotations

from typing import Any

INK, FAINT = "#333333", "#DDDDDD"


def style(axes: Any, title: str) -> None:
    """Dresses matplotlib's axes."""
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
