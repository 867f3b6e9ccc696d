"""A line chart as SVG text: curves of several runs, with axes, labels at the ends of the lines, and room for a cursor.

Colours are left to the page's style sheet: what belongs to run i has the classes ``run`` and ``c<i>``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from megatron_kd.report.palette import COLOURS
from megatron_kd.report.text import short_count

WIDTH, HEIGHT = 560.0, 340.0
LEFT, TOP, BOTTOM = 44.0, 28.0, 42.0
LABELLED_RUNS = 6
"""Labels at the ends of the lines, for at most so many: more would not be read. The keys above the charts name all."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Line:
    """One run in a chart; x and y in the units of the axes.

    Attributes:
        run: its number, which colours it.
        x, y: the line.
        raw: the same points before smoothing, None where they are the same.
        points: single measurements, as (x, y).
    """

    run: int
    label: str
    x: Sequence[float]
    y: Sequence[float]
    raw: Sequence[float] | None
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """Where values lie: x from 0 to ``x_max``, y from 0 to ``y_max``, within a drawing with ``right`` left free."""

    x_max: float
    y_max: float
    right: float

    def x(self, value: float) -> float:
        """In units of the drawing."""
        return LEFT + value / self.x_max * (WIDTH - LEFT - self.right)

    def plot(self) -> dict[str, float]:
        """The same for the page's script."""
        sides = {"left": LEFT, "top": TOP, "bottom": HEIGHT - BOTTOM, "width": WIDTH - LEFT - self.right}
        return {**sides, "x_max": self.x_max, "y_max": self.y_max}

    def y(self, value: float) -> float:
        """In units of the drawing, which count downwards."""
        return HEIGHT - BOTTOM - value / self.y_max * (HEIGHT - TOP - BOTTOM)


def style_class(run: int) -> str:
    """The class that gives a run its colour."""
    return f"run c{run % len(COLOURS)}"


def ticks(largest: float, most: int = 7) -> list[float]:
    """Round values from 0 to at most ``largest``: steps of 1, 2 or 5 times a power of ten."""
    if not largest > 0:
        return [0.0]
    rough = largest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.floor(largest / step * (1 + 1e-9)) + 1)]


def frame_of(lines: Sequence[Line], levels: Sequence[float]) -> Frame:
    """Room for all lines, levels and labels."""
    xs = [x for line in lines for x in (*line.x, *(x for x, _ in line.points))]
    ys = [*levels, *(y for line in lines for y in (*line.y, *(line.raw or ()), *(y for _, y in line.points)))]
    right = 16.0
    if len(lines) <= LABELLED_RUNS:
        longest = max((len(part) for line in lines for part in label_lines(line.label)), default=0)
        right = 22.0 + 7.6 * longest
    return Frame(max(xs, default=0.0) or 1.0, 1.05 * max(ys, default=0.0) or 1.0, right)


def draw_chart(
    lines: Sequence[Line], frame: Frame, x_label: str, y_label: str, describe: str, levels: Sequence[float]
) -> str:
    """The chart as an ``<svg>`` element.

    Args:
        describe: what a reader who does not see it should know.
        levels: what a unigram model reaches, as lines across the plot.
    """
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(describe)}">',
        f'<text class="unit" x="{LEFT - 36:g}" y="{TOP - 14:g}">{escape(y_label)}</text>',
    ]
    left, bottom, end = frame.x(0), frame.y(0), frame.x(frame.x_max)
    for value in ticks(frame.y_max):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 7:.1f}" y="{y + 4:.1f}">{value:g}</text>')
    for value in ticks(frame.x_max, 5):
        text = escape(short_count(round(value, 12)))
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{frame.x(value):.1f}" y="{bottom + 17:.1f}">{text}</text>'
        )
    middle = f'text-anchor="middle" x="{(left + end) / 2:.1f}" y="{HEIGHT - 6:g}"'
    parts.append(f'<text class="unit" {middle}>{escape(x_label)}</text>')
    for level in levels:
        y = frame.y(level)
        parts.append(f'<line class="level" x1="{left:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for line in lines:
        parts += _draw_line(line, frame)
    for level in levels:
        text, y = f"unigram model, held-out: {level:.2f}", frame.y(level) - 5
        parts.append(f'<text class="said" text-anchor="end" x="{end:.1f}" y="{y:.1f}">{text}</text>')
    if len(lines) <= LABELLED_RUNS:
        parts += _end_labels(lines, frame)
    parts.append('<g class="cursor" aria-hidden="true"></g></svg>')
    return "\n".join(parts)


def _draw_line(line: Line, frame: Frame) -> list[str]:
    parts = [f'<g class="{style_class(line.run)}" data-run="{line.run}">']
    if line.raw is not None:
        parts.append(f'<path class="raw" d="{_path(line.x, line.raw, frame)}"/>')
    if line.x:
        dash = DASHES[line.run % len(DASHES)]
        parts.append(f'<path class="line" stroke-dasharray="{dash or "none"}" d="{_path(line.x, line.y, frame)}"/>')
    parts += [_marker(line.run, frame.x(x), frame.y(y)) for x, y in line.points]
    parts.append("</g>")
    return parts


def _path(xs: Sequence[float], ys: Sequence[float], frame: Frame) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(xs, ys, strict=True))


def _marker(run: int, x: float, y: float) -> str:
    """A ring, square, triangle or diamond: shapes repeat what colours say, and sizes keep equal points visible."""
    size = 5.0 - 0.7 * (run % 4)
    across, wide = f"{2 * size:.1f}", f"{1.3 * size:.1f}"
    half = f"a{size:.1f} {size:.1f} 0 1 0"
    shapes = (
        f"M{x - size:.1f} {y:.1f}{half} {across} 0{half} -{across} 0z",
        f"M{x - size:.1f} {y - size:.1f}h{across}v{across}h-{across}z",
        f"M{x:.1f} {y - 1.2 * size:.1f}l{1.2 * size:.1f} {2.1 * size:.1f}h-{2.4 * size:.1f}z",
        f"M{x:.1f} {y - 1.3 * size:.1f}l{wide} {wide}l-{wide} {wide}l-{wide} -{wide}z",
    )
    return f'<path class="point" d="{shapes[run % 4]}"/>'


def label_lines(label: str) -> list[str]:
    """A label in at most two lines of at most 18 characters."""
    lines = [""]
    for word in label.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > 18:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    if len(lines) > 2:
        lines = [lines[0], lines[1] + "…"]
    return [line if len(line) <= 18 else line[:17] + "…" for line in lines]


def _end_labels(lines: Sequence[Line], frame: Frame) -> list[str]:
    """The names of the runs right of their last points, pushed apart where they would overlap."""
    ends = []
    for line in lines:
        last = max([*zip(line.x, line.y, strict=True), *line.points], default=None)
        if last is not None:
            ends.append((frame.y(last[1]), frame.x(last[0]), line))
    ends.sort(key=lambda end: end[0])
    places = spread([y for y, _, _ in ends], [14.0 * len(label_lines(line.label)) + 3 for *_, line in ends])
    parts = []
    for place, (y, x, line) in zip(places, ends, strict=True):
        texts = label_lines(line.label)
        left = frame.x(frame.x_max) + 16
        parts.append(f'<g class="{style_class(line.run)}" data-run="{line.run}">')
        parts.append(f'<path class="leader" d="M{x + 6:.1f} {y:.1f}L{left - 3:.1f} {place:.1f}"/>')
        top = place + 4 - 7.0 * (len(texts) - 1)
        spans = "".join(
            f'<tspan x="{left:.1f}" y="{top + 14 * index:.1f}">{escape(text)}</tspan>'
            for index, text in enumerate(texts)
        )
        parts.append(f'<text class="name">{spans}</text></g>')
    return parts


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Rising positions near the wanted ones, each with its height to itself, within the drawing.

    Args:
        wanted: rising.
    """
    gaps = [(one + other) / 2 for one, other in pairwise(heights)]
    down, up = list(wanted), list(wanted)
    for index, gap in enumerate(gaps, start=1):
        down[index] = max(down[index], down[index - 1] + gap)
    for index in range(len(gaps) - 1, -1, -1):
        up[index] = min(up[index], up[index + 1] - gaps[index])
    # Half way between all pushed down and all pushed up: a crowd stays around its middle, and distances hold.
    places = [(one + other) / 2 for one, other in zip(down, up, strict=True)]
    if not places:
        return places
    above, below = TOP + heights[0] / 2 - places[0], places[-1] + heights[-1] / 2 - HEIGHT
    shift = above if above > 0 else -max(below, 0.0)
    return [place + shift for place in places]
