"""The comparison as one HTML page that opens from a disk: nothing in it is loaded from anywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

from megatron_kd import __version__
from megatron_kd.report.curves import drawn_curves
from megatron_kd.report.figure import baselines, memory_title
from megatron_kd.report.page_chart import Line, draw_chart, frame_of, style_class
from megatron_kd.report.runs import RunRecord
from megatron_kd.report.summary import RunSummary, hours_name
from megatron_kd.report.table import rows, step_parts
from megatron_kd.report.target import Target
from megatron_kd.report.text import DASH, figure, hours_beside, seconds

Show = Callable[[float | None], str]


def comparison_page(
    runs: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    target: Target,
    differences: Sequence[tuple[str, Sequence[Any]]],
    notes: Sequence[str],
) -> str:
    """The whole page as text. All that comes from the runs is escaped.

    Args:
        differences: a dotted key of the recipe and its value in each run.
        notes: what was missing or unreadable, and what must not be compared.
    """
    unit = hours_name(runs)
    curves = [drawn_curves(run) for run in runs]
    charts = {
        "tokens": ("Divergence over tokens", "trained tokens"),
        "hours": (f"Divergence over {unit}", f"{unit} of training steps"),
    }
    drawn, geometry = [], {}
    for axis, (title, x_label) in charts.items():
        text, frame = _chart(axis, title, x_label, curves, summaries, baselines(runs))
        drawn.append(text)
        geometry[axis] = frame
    to_goal = f"{unit[0].upper()}{unit[1:]} to {target.goal}"
    hours = hours_beside(run.gpu_hours for run in summaries)
    in_gib = partial(figure, digits=3, unit="GiB")
    bars = [
        _bars(to_goal, summaries, [run.gpu_hours_to_target for run in summaries], hours, "not reached"),
        _bars("Step time, median", summaries, [run.step_time_s for run in summaries], seconds),
        _stacks("Where a step goes", summaries),
        _bars(memory_title(runs).removesuffix(" (GiB)"), summaries, [run.peak_memory_gib for run in summaries], in_gib),
    ]
    data = {
        "labels": [run.label for run in summaries],
        "curves": curves,
        "charts": geometry,
        "hours": unit,
    }
    parts = {
        "title": escape(_title(runs)),
        "lead": escape(_lead(summaries, target, unit)),
        "keys": "\n".join(_key(index, run) for index, run in enumerate(summaries)),
        "charts": "\n".join(drawn),
        "bars": "\n".join(bars),
        "table": _table("Figures of the runs", summaries, rows(summaries, target, unit)),
        "differences": _differences(summaries, differences),
        "notes": _notes([*([target.explained(unit)] if target.value is not None else []), *notes]),
        "version": escape(__version__),
        # A label must not end the script that holds it.
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = files("megatron_kd.report").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        # Data comes last, so that no text of a run is taken for a place in the template.
        page = page.replace(f"<!--{name}-->", text)
    return page


def _title(runs: Sequence[RunRecord]) -> str:
    groups = {run.setting("logging.wandb.group") for run in runs}
    name = groups.pop() if len(groups) == 1 else None
    return str(name).replace("_", " ") if name else f"{len(runs)} run{'s' if len(runs) > 1 else ''} compared"


def _lead(summaries: Sequence[RunSummary], target: Target, unit: str) -> str:
    """What the figures come to, in a sentence or two."""
    sentences = []
    reached = [(run.gpu_hours_to_target, run.label) for run in summaries if run.gpu_hours_to_target]
    if len(reached) > 1 and target.value is not None:
        (best, label), (worst, other) = min(reached), max(reached)
        sentences.append(
            f"{label} reaches {target.goal} in {figure(best)} {unit}, {other} in {figure(worst)} "
            f"({worst / best:.2f} times as much)."
        )
    used = [(run.peak_memory_gib, run.label) for run in summaries if run.peak_memory_gib]
    if len(used) > 1:
        (least, label), (most, other) = min(used), max(used)
        sentences.append(
            f"{label} holds {figure(least, 3, 'GiB')} at its peak, {other} {figure(most, 3, 'GiB')} "
            f"({most / least:.2f} times as much)."
        )
    return " ".join(sentences)


def _key(index: int, run: RunSummary) -> str:
    return (
        f'<button type="button" class="key {style_class(index)}" data-toggle="{index}" aria-pressed="true">'
        f'<span class="swatch" aria-hidden="true"></span>{escape(run.label)}</button>'
    )


def _chart(
    axis: str,
    title: str,
    x_label: str,
    curves: Sequence[dict[str, Any]],
    summaries: Sequence[RunSummary],
    levels: Sequence[float],
) -> tuple[str, dict[str, float]]:
    """A figure with its drawing, and the frame in which the page's script places its cursor."""
    lines = [line for index, run in enumerate(summaries) if (line := _line(index, run.label, curves[index], axis))]
    if not lines:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">not recorded</p></figure>', {}
    frame = frame_of(lines, levels)
    ends = "; ".join(f"{line.label} ends at {figure((line.y or [y for _, y in line.points])[-1])}" for line in lines)
    drawing = draw_chart(lines, frame, x_label, "KD loss per token", f"{title}. {ends}.", levels)
    text = (
        f'<figure class="chart" data-chart="{axis}" tabindex="0" role="group" aria-label="{escape(title)}: '
        f'arrow keys read out the values"><figcaption>{escape(title)}</figcaption>\n'
        f'<div class="drawing">{drawing}<div class="tip" role="status" hidden></div></div></figure>'
    )
    return text, frame.plot()


def _line(index: int, label: str, curves: dict[str, Any], axis: str) -> Line | None:
    train, held = curves["train"], curves["heldout"]
    x = train[axis] or []
    points = list(zip(held[axis] or [], held["kd"], strict=bool(held[axis])))
    if not x and not points:
        return None
    smoothed = train["smoothed"] if x else []
    raw = train["kd"] if x and train["kd"] != smoothed else None
    return Line(index, label, x, smoothed, raw, points)


def _bars(
    title: str,
    summaries: Sequence[RunSummary],
    values: Sequence[float | None],
    show: Show,
    missing: str = "not recorded",
) -> str:
    largest = max((value for value in values if value is not None), default=0.0) or 1.0
    items = []
    for index, (run, value) in enumerate(zip(summaries, values, strict=True)):
        share = 0.0 if value is None else 100 * value / largest
        items.append(
            f'<li class="{style_class(index)}" data-run="{index}"><span class="of">{escape(run.label)}</span>'
            f'<span class="track" aria-hidden="true"><span class="bar" style="width:{share:.2f}%"></span></span>'
            f'<span class="value">{escape(missing if value is None else show(value))}</span></li>'
        )
    return f'<figure class="bars"><figcaption>{escape(title)}</figcaption><ul>{"".join(items)}</ul></figure>'


def _stacks(title: str, summaries: Sequence[RunSummary]) -> str:
    """The phases of a step side by side, as long as the slowest run's; paler from one to the next."""
    longest = max((sum(run.step_parts_s.values()) for run in summaries), default=0.0)
    if not longest:
        return ""
    items = []
    for index, run in enumerate(summaries):
        parts = run.step_parts_s.values()
        spans = "".join(
            f'<span class="bar" style="width:{100 * part / longest:.2f}%;opacity:{1 - 0.7 * place / len(parts):.2f}">'
            "</span>"
            for place, part in enumerate(parts)
        )
        items.append(
            f'<li class="{style_class(index)}" data-run="{index}"><span class="of">{escape(run.label)}</span>'
            f'<span class="track" style="display:flex" aria-hidden="true">{spans}</span>'
            f'<span class="of">{escape(step_parts(run))}</span></li>'
        )
    return f'<figure class="bars"><figcaption>{escape(title)}</figcaption><ul>{"".join(items)}</ul></figure>'


def _table(
    caption: str, summaries: Sequence[RunSummary], lines: Sequence[tuple[str, Callable[[RunSummary], str]]]
) -> str:
    body = [[title.strip(), *(show(run) for run in summaries)] for title, show in lines]
    return _cells(caption, "figure", summaries, body)


def _differences(summaries: Sequence[RunSummary], differences: Sequence[tuple[str, Sequence[Any]]]) -> str:
    if not differences:
        return "<p>The recipes are equal.</p>" if len(summaries) > 1 else ""
    body = [[key, *(DASH if value is None else str(value) for value in values)] for key, values in differences]
    return _cells("Settings that differ", "key of the recipe", summaries, body)


def _cells(caption: str, first: str, summaries: Sequence[RunSummary], body: Sequence[Sequence[str]]) -> str:
    heads = "".join(
        f'<th scope="col" class="{style_class(index)}"><span class="swatch" aria-hidden="true"></span>'
        f"{escape(run.label)}</th>"
        for index, run in enumerate(summaries)
    )
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in body
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption>{escape(caption)}</caption><thead><tr><th scope="col">{escape(first)}</th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _notes(notes: Sequence[str]) -> str:
    return "".join(f"<li>{escape(note)}</li>" for note in notes)
