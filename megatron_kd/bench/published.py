"""The published figures of the loss alone (the output projection of an 8B model), beside what was measured here.

Published for D 4,096, V 128,256, bf16 on one H200: peak memory, and the time of an iteration as a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_kd.bench.settings import PUBLISHED, Setting
from megatron_kd.planning.published_results import LOSS_ALONE, PublishedFigure

# The published fused loss takes a second projection, as our mode ``recompute`` does: times are given as ratios to it.
FUSED = ("fused", "recompute")
COMPARED = (("dense", ""), ("forward_chunked", ""), FUSED, ("fused", "single_pass"))


def published_figures(setting: Setting) -> list[dict[str, Any]]:
    """The figures at the token numbers of a setting of the published sizes; none for other sizes."""
    if not _is_published(setting):
        return []
    return [asdict(figure) for figure in LOSS_ALONE if figure.tokens in setting.tokens]


def _is_published(setting: Setting) -> bool:
    ours = (setting.hidden, setting.vocab, setting.top_k, setting.dtype)
    return ours == (PUBLISHED.hidden, PUBLISHED.vocab, PUBLISHED.top_k, PUBLISHED.dtype)


def published_table(setting: Setting, results: Sequence[dict[str, Any]]) -> list[str]:
    """The comparison as a text, in a list; an empty list for other sizes than the published."""
    if not _is_published(setting):
        return []
    figures = {(figure.implementation, figure.tokens): figure for figure in LOSS_ALONE}
    rows = {(row["implementation"], row["mode"], row["tokens"]): row for row in results}
    names, figures_of = f"{'tokens':>8} {'implementation':<16} {'mode':<11}", f"{'peak':>13} {'published':>13}"
    lines = [
        "Beside the published figures (peak with inputs in GiB; time as a multiple of fused recompute)",
        f"{names} {figures_of} {'time':>6} {'published':>9}",
    ]
    for tokens in setting.tokens:
        fused = rows.get((*FUSED, tokens))
        for name, mode in COMPARED:
            row = rows.get((name, mode, tokens))
            if row is None:
                continue
            figure = figures.get((name, tokens), PublishedFigure(name, tokens))
            lines.append(
                f"{tokens:>8,} {name:<16} {mode:<11} {_peak(row, setting):>13} {_published_peak(figure):>13} "
                f"{_time(row, fused):>6} {_ratio(figure.time_over_fused):>9}".rstrip()
            )
    return ["\n".join(lines)]


def _peak(row: dict[str, Any], setting: Setting) -> str:
    if row["extra_bytes"] is None:
        return "out of memory"
    return f"{(row['extra_bytes'] + setting.input_bytes(row['tokens'])) / 2**30:.2f}"


def _published_peak(figure: PublishedFigure) -> str:
    if figure.out_of_memory:
        return "out of memory"
    return "" if figure.peak_gib is None else f"{figure.peak_gib:g}"


def _time(row: dict[str, Any], fused: dict[str, Any] | None) -> str:
    if fused is None or row["seconds_median"] is None or fused["seconds_median"] is None:
        return ""
    return _ratio(row["seconds_median"] / fused["seconds_median"])


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
