"""The result of ``bench capture`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLOCKS = {"process_cpu": "microseconds of CPU time a token", "wall": "microseconds a token"}
_LINES = (
    ("forward", "forward to the last hidden states"),
    ("head", "head: all logits, nothing after"),
    ("bare", "bare forward"),
    ("top_k", "top-K: forward and extraction"),
    ("rows", "rows of the cache"),
    ("write", "writing shards"),
    ("capture", "capture"),
)


def capture_table(row: Mapping[str, Any]) -> str:
    """What was measured, each part beside the bare forward pass, and what a capture costs beyond that."""
    ranks = f"{row['tensor_parallel']} × {row['data_parallel']} ranks (tensor × data parallel), " * (row["ranks"] > 1)
    threads = f", {row['threads']} thread{'s' * (row['threads'] > 1)}" * (row["device"] == "cpu")
    lines = [
        f"{row['teacher']}, engine {row['engine']}, {row['dtype']}, top {row['top_k']}, "
        f"vocabulary {row['vocab']:,}, {ranks}{row['device']}{threads}",
        f"{row['rows']:,} row{'s' * (row['rows'] > 1)} of {row['row_tokens']:,} tokens, {row['micro_batch_size']} in a "
        f"pass, shards of {row['shard_tokens']:,} tokens, rows: {row['source']}",
        f"{_CLOCKS[row['clock']]}: median of {row['rounds']} rounds (lowest–highest)",
        "",
    ]
    cells = [_cells(name, label, row) for name, label in _LINES]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for name, line in zip(dict(_LINES), cells, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *padded]))
        if name in ("bare", "capture"):
            lines.append("")
    low, high = row["overhead_spread"]
    return "\n".join(
        [
            *lines,
            f"overhead over the bare forward: {row['overhead']:.1%} ({low:.1%}–{high:.1%}), without the writer "
            f"{row['overhead_without_write']:.1%}; the writer has {row['writer_share']:.2%} of a capture",
            f"tokens per {'CPU ' * (row['clock'] == 'process_cpu')}second: bare forward "
            f"{row['bare_tokens_per_s']:,.0f}, capture {row['capture_tokens_per_s']:,.0f}",
        ]
    )


def _cells(name: str, label: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    median, (low, high) = row["us_per_token"][name], row["us_per_token_spread"][name]
    share = median / row["us_per_token"]["bare"]
    return label, f"{median:,.2f}", f"({low:,.2f}–{high:,.2f})", f"{share:.1%}"
