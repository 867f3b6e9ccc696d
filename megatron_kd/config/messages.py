"""One clear line for everything that pydantic found wrong with a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megatron_kd.config.merge import Key
from megatron_kd.config.schema import TEACHER_INVALID


def explain(error: ValidationError, schema: type[BaseModel], source: Callable[[Key], str], document: str) -> str:
    """The message of a ConfigError.

    Args:
        schema: the class that was validated; its field names serve for suggestions.
        source: maps a path of keys to the file or override that set it.
        document: the file as a whole, for what no single value is to blame for.
    """
    parts: list[str] = []
    for detail in error.errors(include_url=False):
        key = tuple(str(part) for part in detail["loc"])
        if detail["type"] == TEACHER_INVALID:
            continue
        # What is missing, or wrong between several values, is not the fault of one place.
        joint = detail["type"] == "missing" or (detail["type"] == "value_error" and _section(key, schema) is not None)
        where = document if joint else source(key)
        parts.append(f"{where}: {_sentence(key, dict(detail), schema)}")
    # A key that YAML allows may hold a line break; the message is one line all the same.
    return " ".join("; ".join(parts).split())


def _sentence(key: Key, detail: dict[str, Any], schema: type[BaseModel]) -> str:
    dotted = ".".join(key)
    kind, seen = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key {dotted}{_suggestion(key, schema)}"
    if kind == "missing":
        return f"{dotted} is missing{_description(key, schema)}"
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{dotted}: {message}" if dotted else message
    if kind == "literal_error":
        near = difflib.get_close_matches(str(seen), [str(value) for value in _choices(key, schema)], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{dotted} is {seen!r}, must be {detail['ctx']['expected']}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{dotted} is {seen!r}, must match {detail['ctx']['pattern']}{_description(key, schema)}"
    wanted = detail["msg"].removeprefix("Input ").removeprefix("should ")
    wanted = wanted.replace("be a valid dictionary or instance of", "be a section with the keys of")
    return f"{dotted} is {_shown(seen)}, must {wanted}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _suggestion(key: Key, schema: type[BaseModel]) -> str:
    section = _section(key[:-1], schema)
    known = list(section.model_fields) if section is not None else []
    near = difflib.get_close_matches(key[-1], known, n=1, cutoff=0.6)
    if near:
        return f": did you mean {'.'.join((*key[:-1], near[0]))}?"
    elsewhere = [".".join(path) for path in all_keys(schema) if path[-1] == key[-1]]
    if elsewhere:
        return f": did you mean {' or '.join(elsewhere)}?"
    place = ".".join(key[:-1]) or "a recipe"
    return f": {place} has the keys {', '.join(known)}"


def _description(key: Key, schema: type[BaseModel]) -> str:
    section = _section(key[:-1], schema)
    field = section.model_fields.get(key[-1]) if section is not None else None
    text = (field.description or "") if field is not None else ""
    return f" ({text.splitlines()[0].rstrip('.')})" if text else ""


def _choices(key: Key, schema: type[BaseModel]) -> tuple[Any, ...]:
    section = _section(key[:-1], schema)
    field = section.model_fields.get(key[-1]) if section is not None else None
    return get_args(field.annotation) if field is not None else ()


def _section(key: Key, schema: type[BaseModel]) -> type[BaseModel] | None:
    """The class of the section at a path of keys."""
    for name in key:
        field = schema.model_fields.get(name)
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            return None
        schema = inner
    return schema


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section's class in an annotation such as ``X`` or ``X | None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def all_keys(schema: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    """The path of every section and setting of a schema."""
    for name, field in schema.model_fields.items():
        yield (*at, name)
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from all_keys(inner, (*at, name))
