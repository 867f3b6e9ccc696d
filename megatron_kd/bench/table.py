"""The rows of ``bench loss`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_kd.bench.settings import Setting


def result_tables(setting: Setting, results: Sequence[dict[str, Any]]) -> list[str]:
    """One table for each token number, the columns of all alike."""
    width = max([len("implementation"), *(len(row["implementation"]) for row in results)])
    parts = ([row for row in results if row["tokens"] == tokens] for tokens in setting.tokens)
    return [_table(setting, rows, width) for rows in parts if rows]


def _table(setting: Setting, rows: Sequence[dict[str, Any]], width: int) -> str:
    first = rows[0]
    head = (
        f"{first['tokens']:,} tokens, hidden {first['hidden']:,}, vocabulary {first['vocab']:,}, top {first['top_k']}, "
        f"{setting.dtype}, {first['device']}"
    )
    columns = f"{'implementation':<{width}} {'mode':<11} {'× floor':>8} {'seconds':>9} {'extra MiB':>11} {'GFLOP':>11}"
    return "\n".join([head, columns, *(_line(row, width) for row in rows)])


def _line(row: dict[str, Any], width: int) -> str:
    names = f"{row['implementation']:<{width}} {row['mode']:<11} "
    if row["seconds_median"] is None:
        return f"{names}{'out of memory':>18}"
    ratio = "–" if row["ratio_to_floor"] is None else f"{row['ratio_to_floor']:.2f}"
    extra, work = row["extra_bytes"] / 2**20, row["flops"] / 1e9
    return f"{names}{ratio:>8} {row['seconds_median']:>9.3f} {extra:>11,.1f} {work:>11,.1f}"
