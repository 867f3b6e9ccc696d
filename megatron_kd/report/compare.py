"""Comparing runs: one call from what names them to table, picture, page and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from megatron_kd.errors import ConfigError
from megatron_kd.files import write_atomic
from megatron_kd.report.curves import drawn_curves
from megatron_kd.report.figure import draw_comparison
from megatron_kd.report.page import comparison_page
from megatron_kd.report.runs import RunRecord
from megatron_kd.report.sources import find_runs
from megatron_kd.report.summary import RunSummary, hours_name, labels, setting_differences, summarize
from megatron_kd.report.table import comparison_table
from megatron_kd.report.target import Target, comparability_notes, find_target

FIGURE, PAGE = "compare.png", "compare.html"


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found.

    Attributes:
        records: the runs as they were read.
        runs: the figures of each run, in the given order.
        target: the divergence that all runs are asked for.
        differences: each dotted key of the recipes whose value is not the same everywhere, with its value in each run.
        notes: what was missing or unreadable, and what must not be compared.
        figure: the picture.
        page: the page, one file that needs no other.
    """

    records: list[RunRecord]
    runs: list[RunSummary]
    target: Target
    differences: list[tuple[str, list[Any]]]
    notes: list[str]
    figure: Path
    page: Path

    def hours_name(self) -> str:
        """GPU-hours, or rank-hours on a CPU."""
        return hours_name(self.records)

    def table(self) -> RenderableType:
        """For a rich console: figures, settings that differ, notes."""
        return comparison_table(self.runs, self.target, self.hours_name(), self.differences, self.notes)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values, with the curves; None stands for what was not recorded.

        ``curves`` holds one mapping a run, as ``report.curves.drawn_curves`` describes it.
        """
        return {
            "runs": [asdict(run) for run in self.runs],
            "target": {"kl": self.target.value, "basis": self.target.basis},
            "hours": self.hours_name(),
            "differences": [{"key": key, "values": values} for key, values in self.differences],
            "notes": self.notes,
            "figure": str(self.figure),
            "page": str(self.page),
            "curves": [drawn_curves(record) for record in self.records],
        }


def compare(runs: Sequence[str | Path], out_dir: str | Path, kl: float | None = None) -> Comparison:
    """Compares runs, finished or not, and draws ``compare.png`` and ``compare.html`` into ``out_dir``.

    Args:
        runs: run directories, folders that wandb wrote, addresses on a wandb server.
        kl: the divergence to which GPU-hours are counted; None: the highest of the runs' final ones.

    Raises:
        KDError: when no run is given, one is given twice, is none, or cannot be reached.
    """
    if kl is not None and not 0 < kl < math.inf:
        raise ConfigError(f"--kl is {kl:g}, must be a number above 0")
    records = [source.read() for source in find_runs(runs)]
    named = labels(records)
    target = find_target(records, kl)
    summaries = [summarize(*columns) for columns in zip(records, named, target.hours, target.final, strict=True)]
    out_dir = Path(out_dir)
    found = Comparison(
        records=records,
        runs=summaries,
        target=target,
        differences=setting_differences(records),
        notes=[
            *comparability_notes(records, named, target),
            *(note for record in records for note in record.notes),
        ],
        figure=out_dir / FIGURE,
        page=out_dir / PAGE,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(found.figure, draw_comparison(records, summaries, target))
    write_atomic(
        found.page,
        comparison_page(records, summaries, target, found.differences, found.notes),
    )
    return found
