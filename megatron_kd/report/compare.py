"""Comparing runs: one call from run directories to table, picture and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from megatron_kd.errors import KDError
from megatron_kd.files import write_atomic
from megatron_kd.report.figure import draw_comparison
from megatron_kd.report.runs import read_run
from megatron_kd.report.summary import RunSummary, labels, setting_differences, summarize
from megatron_kd.report.table import comparison_table

FIGURE = "compare.png"


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found.

    Attributes:
        runs: the figures of each run, in the given order.
        differences: each dotted key of the recipes whose value is not the same everywhere, with its value in each run.
        figure: the picture.
        notes: what was missing or unreadable in the run directories.
    """

    runs: list[RunSummary]
    differences: list[tuple[str, list[Any]]]
    figure: Path
    notes: list[str]

    def table(self) -> RenderableType:
        """For a rich console: figures, settings that differ, notes."""
        return comparison_table(self.runs, self.differences, self.notes)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values; None stands for what was not recorded."""
        return {
            "runs": [asdict(run) for run in self.runs],
            "differences": [{"key": key, "values": values} for key, values in self.differences],
            "figure": str(self.figure),
            "notes": self.notes,
        }


def compare(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Comparison:
    """Compares runs, finished or not, and draws ``compare.png`` into ``out_dir``.

    Raises:
        KDError: when no run is given, one is given twice, or one is not a run directory.
    """
    if not run_dirs:
        raise KDError("nothing to compare: give at least one run directory")
    places = [Path(directory).resolve() for directory in run_dirs]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise KDError(f"{run_dirs[index]}: given twice: name each run directory once")
    records = [read_run(directory) for directory in run_dirs]
    summaries = [summarize(record, label) for record, label in zip(records, labels(records), strict=True)]
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(out_dir / FIGURE, draw_comparison(records, summaries))
    return Comparison(
        runs=summaries,
        differences=setting_differences(records),
        figure=out_dir / FIGURE,
        notes=[note for record in records for note in record.notes],
    )
