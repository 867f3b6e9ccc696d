"""One progress bar for every long step, on standard error so that ``--json`` keeps standard output to itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Advance(Protocol):
    """Reports work done: ``advance(units, note)``; the note replaces the text behind the bar."""

    def __call__(self, units: float = 1, note: str = "") -> None: ...


def _silent(units: float = 1, note: str = "") -> None:
    return None


@contextmanager
def progress(description: str, total: int, *, unit: str = "", enabled: bool = True) -> Iterator[Advance]:
    """A bar of ``total`` units. On a terminal it is redrawn in place; elsewhere a line is printed every ten seconds.

    Args:
        enabled: give False on every rank but the first; nothing is then printed.
    """
    if not enabled:
        yield _silent
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _lines(description, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(description, total=total, note="")

        def advance(units: float = 1, note: str = "") -> None:
            bars.advance(task, units)
            if note:
                bars.update(task, note=note)

        yield advance


def duration(seconds: float) -> str:
    """In the unit that people read at a glance: ``90 s``, ``45 min``, ``30.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _lines(description: str, total: int, unit: str, every_s: float = 10.0) -> Iterator[Advance]:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    started = last = time.monotonic()
    done = 0.0

    def advance(units: float = 1, note: str = "") -> None:
        nonlocal done, last
        done += units
        now = time.monotonic()
        if done < total and now - last < every_s:
            return
        last = now
        elapsed = now - started
        left = elapsed / done * (total - done) if done else 0.0
        console.print(
            f"{description}: {done:.12g}/{total} {unit} · {duration(elapsed)}, {duration(left)} left"
            f"{' · ' if note else ''}{note}"
        )

    yield advance
