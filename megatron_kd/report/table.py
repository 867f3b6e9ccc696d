"""The comparison as a table for the terminal: one column a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from megatron_kd.report.summary import RunSummary
from megatron_kd.report.target import Target
from megatron_kd.report.text import DASH, count, figure, hours_beside, percent, seconds


def _change(before: float | None, after: float | None, show: Callable[[float | None], str]) -> str:
    return DASH if before is None and after is None else f"{show(before)} → {show(after)}"


def _heldout(run: RunSummary) -> str:
    factor = "" if run.heldout_kd_factor is None else f" ({run.heldout_kd_factor:.1f}× lower)"
    return _change(run.heldout_kd_before, run.heldout_kd_after, figure) + factor


COLUMN = 16
"""Characters that a column has at least, where the terminal has them."""
Row = tuple[str, Callable[[RunSummary], str]]
ROWS: tuple[Row, ...] = (
    ("run directory", lambda run: run.directory),
    ("method", lambda run: run.method or DASH),
    ("teacher's targets", lambda run: run.targets or DASH),
    ("layout", lambda run: run.layout or DASH),
    ("iterations", lambda run: count(run.iterations)),
    ("tokens", lambda run: count(run.tokens)),
    ("step time, median", lambda run: seconds(run.step_time_s)),
    ("waiting for targets", lambda run: seconds(run.cache_wait_s)),
    ("tokens/s, all ranks", lambda run: figure(run.tokens_per_s, 4)),
    ("TFLOP/s per rank, student", lambda run: figure(run.tflops_per_gpu)),
    ("  teacher included", lambda run: figure(run.tflops_per_gpu_with_teacher)),
    ("peak memory of a rank", lambda run: figure(run.peak_memory_gib, 3, "GiB")),
    ("training KD, first → last", lambda run: _change(run.train_kd_first, run.train_kd_last, figure)),
    ("held-out KD, before → after", _heldout),
    ("  unigram model", lambda run: figure(run.unigram_kd)),
    (
        "held-out forward KL",
        lambda run: _change(run.heldout_forward_kl_before, run.heldout_forward_kl_after, figure),
    ),
    ("held-out perplexity", lambda run: _change(run.perplexity_before, run.perplexity_after, figure)),
    ("top-1 agreement", lambda run: _change(run.agreement_before, run.agreement_after, percent)),
)


def rows(runs: Sequence[RunSummary], target: Target, hours_name: str) -> list[Row]:
    """All rows of the table: a title, and the text of a run's cell."""
    found = list(ROWS)
    hours = hours_beside(run.gpu_hours for run in runs)
    times: list[Row] = [(f"{hours_name}, training steps", lambda run: hours(run.gpu_hours))]
    if target.value is not None:
        times.append((f"{hours_name} to {target.goal}", lambda run: hours(run.gpu_hours_to_target)))
    place = next(index for index, (title, _) in enumerate(found) if title.startswith("peak memory")) + 1
    return [*found[:place], *times, *found[place:]]


def comparison_table(
    runs: Sequence[RunSummary],
    target: Target,
    hours_name: str,
    differences: Sequence[tuple[str, Sequence[Any]]],
    notes: Sequence[str],
) -> RenderableType:
    """The table of figures, the settings that differ and the notes, to be printed by a rich console.

    Args:
        hours_name: GPU-hours or rank-hours.
        differences: a dotted key of the recipe and its value in each run.
        notes: what was missing or unreadable, and what must not be compared.
    """
    named = [run.label for run in runs]
    figures = [(title, [show(run) for run in runs]) for title, show in rows(runs, target, hours_name)]
    parts: list[RenderableType] = [_Columns("Comparison of runs", "", named, figures)]
    if differences:
        settings = [(key, [DASH if value is None else str(value) for value in values]) for key, values in differences]
        parts.append(_Columns("Settings that differ", "key", named, settings))
    elif len(runs) > 1:
        parts.append(Text("The recipes are equal."))
    if target.value is not None:
        parts.append(Text(target.explained(hours_name)))
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    return Group(*parts)


@dataclass(frozen=True)
class _Columns:
    """One column a run; as many beside each other as the terminal has room for, the others in tables below."""

    title: str
    first_column: str
    labels: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - max(len(name) for name, _ in self.lines)
        beside = max(1, room // COLUMN)
        for start in range(0, len(self.labels), beside):
            yield self._table(slice(start, start + beside), whole=beside >= len(self.labels))

    def _table(self, shown: slice, whole: bool) -> Table:
        labels = self.labels[shown]
        numbers = f"{shown.start + 1} to {shown.start + len(labels)} of {len(self.labels)}"
        title = self.title if whole else f"{self.title}, {numbers}"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(self.first_column, no_wrap=True)
        for label in labels:
            table.add_column(Text(label), overflow="fold")
        for name, cells in self.lines:
            table.add_row(name, *map(Text, cells[shown]))
        return table
