"""The results of ``bench cache`` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("format", "values", "bytes/token", "× Megatron-LM", "written", "random rows", "slices, cp 2", "in order")
_RATES = ("write", "read", "cp_read", "ordered_read")


def cache_table(results: Sequence[Mapping[str, Any]], targets: Mapping[str, Any], rank_table: Mapping[str, Any]) -> str:
    """A table of all formats, rates in thousands of tokens per CPU second with their range, and the parts of ours."""
    lengths = targets["row_tokens"]
    rows = f"{targets['rows']:,} row{'s' if targets['rows'] != 1 else ''} of "
    rows += f"{lengths[0]:,}" if lengths[0] == lengths[1] else f"{lengths[0]:,} to {lengths[1]:,}"
    first = results[0]
    head = (
        f"{targets['tokens']:,} tokens ({rows}), top {first['top_k']}, vocabulary {first['vocab']:,}, "
        f"{targets['source']}\n"
        f"thousands of tokens per CPU second: median of {targets['rounds']} rounds (lowest–highest), "
        f"{targets['rate_tokens']:,} tokens each"
    )
    lines = [_COLUMNS, *map(_line, results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    table = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([head, "", *table, "", *_details(first, rank_table)])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    ratios = row["ratio_to_megatron_lm"]
    rates = [f"{row[f'{name}_tokens_per_s'] / 1000:,.0f} {_range(row['spread'][name])}" for name in _RATES]
    size = f"{row['bytes_per_token']:.1f}"
    return row["format"], row["values_dtype"], size, "–" if ratios is None else f"{ratios['bytes']:.3f}", *rates


def _range(spread: Sequence[float]) -> str:
    return f"({spread[0] / 1000:,.0f}–{spread[1] / 1000:,.0f})"


def _details(ours: Mapping[str, Any], rank_table: Mapping[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {size:.2f}" for name, size in ours["bytes_per_token_by_part"].items())
    counted = "the measured positions themselves" if rank_table["in_sample"] else "positions that are not measured"
    return [
        f"ours, float16, bytes per token: {parts}",
        f"rank table: {rank_table['bytes']:,} bytes, once a cache ({rank_table['bytes_per_token_of_a_full_shard']:.2f} "
        f"bytes per token of a full shard), not in the figures above; counted from {rank_table['counted_positions']:,} "
        f"{counted}; from the measured ones it would be {rank_table['bytes_per_token_in_sample']:.1f} bytes per token",
    ]
