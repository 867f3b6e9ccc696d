"""The summary of a cache as people read it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from megatron_kd.cache.text import printable, size_text

_WIDTH = 120  # characters
_BAR = 40


def inspect_text(seen: Mapping[str, Any]) -> str:
    """What ``inspect`` found: shape, progress, identity, cost, mass, problems. Everything it names is printable."""
    complete = "complete" if seen["complete"] else "incomplete"
    if seen["missing_samples"]:
        complete += f", samples {seen['missing_samples']} are missing"
    if seen["problems"]:
        complete = ("all is committed" if seen["complete"] else complete) + ", but there are problems, see below"
    temperatures = ", ".join(f"{temperature:g}" for temperature in seen["temperatures"])
    lines = [
        f"{printable(seen['path'])}: {complete}",
        *_table(
            [
                ("rows", f"{seen['rows_committed']:,} of {seen['rows']:,}, {seen['tokens']:,} tokens"),
                ("shards", f"{seen['shards_committed']:,} of {seen['shards']:,}, {seen['rows_per_shard']:,} rows each"),
                ("targets", f"top {seen['top_k']} of {seen['vocab_size']:,} as {seen['value_dtype']}"),
                ("temperatures", temperatures),
                ("cache_id", seen["cache_id"]),
            ]
        ),
    ]
    for name in ("teacher", "tokenizer", "corpus", "library_versions"):
        if seen[name]:
            lines += ["", name.replace("_", " "), *_table([_fact(key, value) for key, value in seen[name].items()])]
    if seen["bytes_per_token"] is not None:
        lines += ["", *_cost(seen)]
    if seen["top_k_mass"] is not None:
        lines += ["", *_mass(seen["top_k_mass"], seen["top_k"])]
    if seen["problems"]:
        lines += [
            "",
            "problems (`megatron-kd cache verify` finds all)",
            *(f"  {printable(problem)}" for problem in seen["problems"]),
        ]
    return "\n".join(lines)


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    indent = " " * (width + 4)
    lines = []
    for name, value in rows:
        parts = textwrap.wrap(value, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"  {name:<{width}}  {parts[0]}", *(indent + part for part in parts[1:])]
    return lines


def _fact(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    return printable(name), printable(str(value))


def _cost(seen: Mapping[str, Any]) -> list[str]:
    total = seen["bytes_per_token"]
    parts = sorted(seen["bytes_per_token_by_array"].items(), key=lambda part: (-part[1], part[0]))
    return [
        f"bytes per token: {total:.1f}, {size_text(seen['bytes'])} in all",
        *(f"  {name:<24} {size:>8.2f} {size / total:>7.1%}  {_bar(size / total)}".rstrip() for name, size in parts),
    ]


def _mass(mass: Mapping[str, Any], top_k: int) -> list[str]:
    edges = mass["edges"]
    bins = zip(edges[:-1], edges[1:], mass["histogram"], strict=True)
    return [
        f"probability of the top {top_k}: {mass['mean']:.4f} in the mean of {mass['positions']:,} positions "
        f"of {mass['rows']} rows",
        *(f"  {low:>5g} to {high:<5g} {share:>7.1%}  {_bar(share)}".rstrip() for low, high, share in bins),
    ]


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
