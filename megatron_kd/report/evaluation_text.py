"""An evaluation, and the scores of tasks, as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_kd.report.text import DASH, count, figure, percent

_BY_BIN = ("tokens", "KD", "CE", "top-1", "top-5")
_TABLES = {
    "by_position": "position in the row",
    "by_entropy": "teacher's entropy, nats",
    "reliability": "student's confidence",
    "teacher_reliability": "teacher's confidence",
}


def evaluation_text(result: Mapping[str, Any]) -> str:
    """The means, one a line, then the tables.

    Args:
        result: of ``evaluate``: numbers under eval/…, and lists of rows.
    """
    lines = [f"{name:26} {value:.6g}" for name, value in result.items() if name.startswith("eval/")]
    for key, title in _TABLES.items():
        if key in result:
            lines += ["", *_table(key, title, result[key])]
    return "\n".join(lines)


def _table(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if key in ("by_position", "by_entropy"):
        cells = [
            (
                _positions(row) if key == "by_position" else _interval(row),
                count(row["tokens"]),
                figure(row["kd"]),
                figure(row["ce"]),
                percent(row["top1_agreement"]),
                percent(row["top5_agreement"]),
            )
            for row in rows
        ]
        return columns((title, *_BY_BIN), cells)
    cells_of_confidence = [
        (_interval(row), count(row["tokens"]), percent(row["confidence"]), percent(row["accuracy"])) for row in rows
    ]
    return columns((title, "tokens", "mean", "right"), cells_of_confidence)


def _positions(row: Mapping[str, Any]) -> str:
    return str(row["from"]) if row["from"] == row["to"] else f"{row['from']}–{row['to']}"


def _interval(row: Mapping[str, Any]) -> str:
    return f"≥ {row['from']:.3g}" if row["to"] is None else f"{row['from']:.3g}–{row['to']:.3g}"


def task_scores_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a score: the teacher's, the student's, their difference, each with its standard error where known."""
    titles = ("task", "metric", "items", "teacher", "±", "student", "±", "difference", "±")
    cells = [
        (
            row["task"],
            row["metric"],
            count(row["items"]),
            _score(row["teacher"]),
            _score(row["teacher_stderr"]),
            _score(row["student"]),
            _score(row["student_stderr"]),
            _score(row["difference"], "+"),
            _score(row["difference_stderr"]),
        )
        for row in rows
    ]
    return "\n".join(columns(titles, cells, text_columns=2))


def _score(value: float | None, sign: str = "") -> str:
    return DASH if value is None else f"{value:{sign}.4f}"


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> list[str]:
    """Lines of a table: the first columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < text_columns else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (titles, *rows)
    ]
