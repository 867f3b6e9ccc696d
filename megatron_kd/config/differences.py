"""What two recipes have in common is left out; the rest is a list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def recipe_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings in which two resolved recipes differ, as (dotted key, value in a, value in b), sorted by key.

    Lists count as one value; a key that is missing on one side counts as None there.
    """
    flat_a, flat_b = dict(_flatten(a)), dict(_flatten(b))
    keys = sorted(flat_a.keys() | flat_b.keys())
    return [(key, flat_a.get(key), flat_b.get(key)) for key in keys if not _same(flat_a.get(key), flat_b.get(key))]


def _same(a: Any, b: Any) -> bool:
    # True == 1 in Python, but not in a recipe.
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
