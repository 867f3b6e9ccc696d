"""Single values of a recipe, for scripts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from megatron_kd.config.messages import all_keys
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError


def field_values(recipe: Recipe, names: Sequence[str]) -> dict[str, Any]:
    """The values at dotted keys such as ``cluster.nodes``; None below a section that is not set. Sections are mappings.

    Raises:
        ConfigError: a recipe has no such key; names the nearest.
    """
    known = [".".join(path) for path in all_keys(Recipe)]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"--field {name}: a recipe has no such key: did you mean {nearest}?")
    return {name: _value(recipe, name) for name in names}


def field_line(name: str, value: Any) -> str:
    """A value as one line: text as it is, nothing for None, all else as JSON.

    Raises:
        ConfigError: the text has a line break, so that lines would no longer be values.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if "\n" in value:
        raise ConfigError(f"--field {name}: {value!r} has a line break: take it from --json")
    return value


def _value(recipe: Recipe, name: str) -> Any:
    found: Any = recipe
    for part in name.split("."):
        found = None if found is None else getattr(found, part)
    return found.model_dump(mode="json") if isinstance(found, BaseModel) else found
