"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

DASH = "–"
"""Stands for what was not recorded."""


def count(value: int | None) -> str:
    """With separators between the thousands."""
    return DASH if value is None else f"{value:,}"


def figure(value: float | None, digits: int = 3, unit: str = "") -> str:
    """Rounded to so many significant digits, without an exponent unless it is tiny: 0.8 → 0.800, 42000 → 42,000."""
    if value is None:
        return DASH
    if value != 0 and abs(value) < 1e-3:
        text = f"{value:.{digits - 1}e}"
    else:
        # The exponent after rounding tells how many places are left: 9.996 has three digits as 10.0.
        exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
        text = f"{round(value, digits - 1 - exponent):,.{max(digits - 1 - exponent, 0)}f}"
    return f"{text} {unit}" if unit else text


def seconds(value: float | None) -> str:
    """In s, or in ms below a tenth of a second."""
    if value is not None and value < 0.1:
        return figure(value * 1000, 3, "ms")
    return figure(value, 3, "s")


def percent(value: float | None) -> str:
    """A fraction as per cent with one place."""
    return DASH if value is None else f"{value:.1%}"


def hours_beside(values: Iterable[float | None]) -> Callable[[float | None], str]:
    """How to write GPU-hours that stand beside each other: in h, or all of them in s where the runs are that short."""
    if max((value for value in values if value is not None), default=1.0) < 0.01:
        return lambda value: figure(None if value is None else value * 3600, 3, "s")
    return lambda value: figure(value, 3, "h")


def short_count(value: float) -> str:
    """For the ticks of an axis: 16000 → 16k."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
