"""The points of a sweep in one table: what varies first, then how far each is and what it reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_kd.config.fields import field_values
from megatron_kd.config.sweep import Point, Sweep, short_keys
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.plan import Plan
from megatron_kd.report import compare
from megatron_kd.report.summary import RunSummary
from megatron_kd.report.text import DASH, figure, percent, seconds
from megatron_kd.sweep.folder import OWN, State, state_of

PLACES = ("data.samples", "teacher.cache", "teacher.checkpoint", "student.checkpoint")
"""Keys that say where things lie: they differ because something else does."""
FIGURES: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("held-out KD", lambda run: figure(run.heldout_kd_after)),
    ("forward KL", lambda run: figure(run.heldout_forward_kl_after)),
    ("perplexity", lambda run: figure(run.perplexity_after)),
    ("top-1", lambda run: percent(run.agreement_after)),
    ("step", lambda run: seconds(run.step_time_s)),
    ("memory", lambda run: figure(run.peak_memory_gib, 3, "GiB")),
)


@dataclass(frozen=True)
class SweepTable:
    """What became of a sweep.

    Attributes:
        rows: each point with its state and, once its run has begun, its figures.
        page: the comparison of the runs that have begun; None where none has.
        notes: what was missing, and what does not compare.
    """

    sweep: Sweep
    rows: list[tuple[Point, State, RunSummary | None]]
    page: Path | None
    notes: list[str]

    def render(self) -> RenderableType:
        """For a rich console."""
        cells = [
            [state.name, *(DASH if run is None else show(run) for _, show in FIGURES)] for _, state, run in self.rows
        ]
        parts: list[RenderableType] = [_table(self.sweep, ["state", *(title for title, _ in FIGURES)], cells)]
        parts += [Text(f"note: {note}", style="yellow") for note in self.notes]
        if self.page is not None:
            parts.append(Text(f"page: {self.page}", overflow="fold"))
        return Group(*parts)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values; None stands for what was not recorded."""
        return {
            "sweep": self.sweep.name,
            "points": [
                {
                    **_named(point),
                    "state": state.name,
                    "iteration": state.iteration,
                    "figures": None if run is None else asdict(run),
                }
                for point, state, run in self.rows
            ],
            "page": None if self.page is None else str(self.page),
            "notes": self.notes,
        }


def sweep_table(sweep: Sweep) -> SweepTable:
    """Reads the run directories of all points and compares those that have begun. Raises KDError as ``compare``."""
    states = [(point, state_of(point)) for point in sweep.points]
    begun = [point for point, _ in states if (Path(point.recipe.run_dir) / "metrics.jsonl").is_file()]
    figures: dict[str, RunSummary] = {}
    page, notes = None, []
    if begun:
        found = compare([point.recipe.run_dir for point in begun], sweep.run_dir / OWN)
        figures = dict(zip((point.name for point in begun), found.runs, strict=True))
        page, notes = found.page, found.notes
    return SweepTable(sweep, [(point, state, figures.get(point.name)) for point, state in states], page, notes)


def points_table(sweep: Sweep, points: Sequence[Point], plans: Sequence[Plan] | None) -> RenderableType:
    """What would be run: the points with their states, and with their plans where these were made."""
    titles = ["state"]
    cells = [[state_of(point).name] for point in points]
    if plans is not None:
        titles += ["memory, planned", "step, planned", "hours, planned"]
        for row, plan in zip(cells, plans, strict=True):
            row += [
                figure(plan.memory.total / GIB, 3, "GiB") + ("" if plan.memory.fits else ", too much"),
                seconds(plan.step.seconds),
                figure(plan.train_hours),
            ]
    return _table(sweep, titles, cells, points)


def points_json(points: Sequence[Point], plans: Sequence[Plan] | None) -> list[dict[str, Any]]:
    """The same as plain JSON values."""
    found: list[dict[str, Any]] = [{**_named(point), "state": state_of(point).name} for point in points]
    for row, plan in zip(found, plans or (), strict=False):
        row["plan"] = plan.to_dict()
    return found


def _named(point: Point) -> dict[str, Any]:
    return {"name": point.name, "values": point.values, "run_dir": point.recipe.run_dir}


def _table(
    sweep: Sweep, titles: Sequence[str], cells: Sequence[Sequence[str]], points: Sequence[Point] | None = None
) -> Table:
    points = sweep.points if points is None else points
    varied = _varied(sweep)
    short = short_keys(list(varied))
    table = Table(title=f"Sweep {sweep.name}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge = False
    table.add_column("point", no_wrap=True)
    for key in varied:
        table.add_column(short[key])
    for title in titles:
        table.add_column(title)
    at = {point.name: index for index, point in enumerate(sweep.points)}
    for point, row in zip(points, cells, strict=True):
        values = [varied[key][at[point.name]] for key in varied]
        table.add_row(*map(Text, [point.name, *(_shown(value) for value in values), *row]))
    return table


def _varied(sweep: Sweep) -> dict[str, list[Any]]:
    """The keys that are not the same in all points, with the value of each."""
    found = {key: [field_values(point.recipe, [key])[key] for point in sweep.points] for key in sweep.keys}
    return {
        key: values
        for key, values in found.items()
        if key not in PLACES and any(value != values[0] for value in values)
    }


def _shown(value: Any) -> str:
    if value is None:
        return DASH
    return f"{value:g}" if isinstance(value, float) else str(value)
