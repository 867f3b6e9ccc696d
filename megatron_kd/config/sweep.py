"""A sweep: one recipe, and what varies. Its points are recipes of their own, all checked before the first one runs."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megatron_kd.config.base import PathString, Section
from megatron_kd.config.load import load_recipe
from megatron_kd.config.messages import all_keys, explain
from megatron_kd.config.schema import Recipe
from megatron_kd.config.yaml_text import parse_yaml, read_mapping
from megatron_kd.errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MOST_POINTS = 1000
"""More are taken for a mistake: one value too many on each of several axes."""
OWN_KEYS = ("name", "run_dir", "extends", "logging.wandb.group")
"""Keys of a recipe that the sweep itself sets, or that belong into a file."""


class SweepFile(Section):
    """The file of a sweep: a recipe, and the values that take turns in it."""

    name: Annotated[str, Field(pattern=NAME)] | None = None
    """Name of the sweep and its group in wandb; null: that of the file."""
    base: PathString
    """The recipe that all points are changes of, relative to the sweep's file."""
    run_dir: PathString | None = None
    """Folder of the points' run directories, relative to the current directory; null: runs/<name>."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Dotted keys of the recipe, each with a list of values: a point for every combination."""
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """More points by name, each with the keys that it changes; {} is the base itself."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: of the point within the sweep; its run directory ends in it.
        values: the keys that it changes.
        recipe: resolved, with the sweep's name, run directory and group.
    """

    name: str
    values: dict[str, Any]
    recipe: Recipe


@dataclass(frozen=True)
class Sweep:
    """All points, in the order of the file: the grid, its last key changing fastest, then the named runs.

    Attributes:
        run_dir: the folder that holds the points' run directories.
        base: the recipe that they are changes of.
    """

    name: str
    run_dir: Path
    base: Recipe
    points: list[Point]

    @property
    def keys(self) -> list[str]:
        """Every key that some point changes, in the order of the file; a section stands for its own keys."""
        return list(dict.fromkeys(key for point in self.points for key in _leaves(point.values)))


def load_sweep(path: str | Path, overrides: Sequence[str] = (), *, base: str | Path | None = None) -> Sweep:
    """Loads a sweep and the recipe of every point.

    A cache that serves several temperatures is captured at all of them: what ``loss.temperature`` takes in offline
    points is added to their ``teacher.temperatures``, unless a point or an override sets these.

    Args:
        path: the sweep's file.
        overrides: ``dotted.key=value`` for all points.
        base: a recipe to be used instead of the file's; its name then stands before the sweep's.

    Raises:
        ConfigError: one line with everything that is wrong, in the file or in any point.
    """
    path = Path(path)
    file = _read(path)
    if not file.grid and not file.runs:
        raise ConfigError(f"{path} has no points: give it a grid of keys and values, or runs by name")
    _check_keys(file, path, overrides)
    recipe = Path(base) if base is not None else Path(os.path.normpath(path.parent / file.base))
    name = file.name or re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)
    loaded_base = load_recipe(recipe, overrides, trains=False)
    if base is not None:
        name = f"{loaded_base.name}_{name}"
    run_dir = file.run_dir or f"runs/{name}"
    named = dict(_points(file, path))
    shared = _shared_overrides(loaded_base, name, named, overrides)
    points: list[Point] = []
    problems: dict[str, list[str]] = {}
    for point, values in named.items():
        own = [f"name={name}_{point}", f"run_dir={run_dir}/{point}"]
        try:
            loaded = load_recipe(recipe, [*overrides, *shared, *(_override(*item) for item in values.items()), *own])
            points.append(Point(point, values, loaded))
        except ConfigError as error:
            problems.setdefault(str(error), []).append(point)
    if problems:
        said = "; ".join(f"{', '.join(which)}: {what}" for what, which in problems.items())
        raise ConfigError(f"{path}: {len(named) - len(points)} of {len(named)} points cannot run: {said}")
    return Sweep(name, Path(run_dir), loaded_base, points)


def _read(path: Path) -> SweepFile:
    values = read_mapping(path)
    if "extends" in values or "training" in values:
        raise ConfigError(
            f"{path} is a recipe: a sweep is a file of its own, base: {path.name} with grid or runs; "
            "see recipes/ablations"
        )
    try:
        return SweepFile.model_validate(values)
    except ValidationError as error:
        text = explain(error, SweepFile, lambda key: str(path), str(path))
        raise ConfigError(text.replace(": a recipe has the keys", ": a sweep has the keys")) from None


def _check_keys(file: SweepFile, path: Path, overrides: Sequence[str]) -> None:
    known = {".".join(key) for key in all_keys(Recipe)}
    problems = []
    varied = {f"grid.{key}": key for key in file.grid}
    varied |= {f"runs.{run}.{key}": key for run, values in file.runs.items() for key in values}
    for place, key in varied.items():
        if key in OWN_KEYS:
            problems.append(f"{place}: the sweep sets {key} itself: remove it")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            problems.append(f"{place}: a recipe has no key {key}: did you mean {near}?")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in file.grid:
            problems.append(f"override {override!r}: {key} is what the sweep varies: change its file, or use --only")
        elif key in OWN_KEYS:
            problems.append(f"override {override!r}: the sweep sets {key} itself")
    for run in file.runs:
        if not re.fullmatch(NAME, run):
            problems.append(f"runs: {run!r} is no name: letters, digits, dot, underscore and hyphen")
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}")


def _points(file: SweepFile, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if math.prod(len(values) for values in file.grid.values()) > MOST_POINTS:
        raise ConfigError(f"{path}: grid has more than {MOST_POINTS} points: take values out, or make several sweeps")
    seen: set[str] = set()
    short = short_keys(list(file.grid))
    combinations = product(*file.grid.values()) if file.grid else ()
    found = [dict(zip(file.grid, values, strict=True)) for values in combinations]
    for values in found:
        name = "-".join(f"{short[key]}_{_text(value)}" for key, value in values.items())
        if name in seen:
            raise ConfigError(f"{path}: grid has the point {name} twice: remove a value, or name these points in runs")
        seen.add(name)
        yield name, values
    for name, values in file.runs.items():
        if name in seen:
            raise ConfigError(f"{path}: runs.{name} has the name of a point of grid: call it otherwise")
        yield name, values


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def _text(value: Any) -> str:
    """A value within a file's name: 1.0 is 1, a path has hyphens for slashes."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-") or "empty"


def _override(key: str, value: Any) -> str:
    """``key=value`` as a person would type it where that means the same."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        try:
            plain = parse_yaml(text, key) == value
        except ConfigError:
            plain = False
        text = text if plain else json.dumps(value, ensure_ascii=False)
    return f"{key}={text}"


def _shared_overrides(
    base: Recipe, name: str, points: dict[str, dict[str, Any]], overrides: Sequence[str]
) -> list[str]:
    """What the sweep sets in every point beside name and folder: the group in wandb, the temperatures of the cache."""
    found = []
    if base.logging.wandb is not None:
        found.append(f"logging.wandb.group={name}")
    asked = {float(t) for values in points.values() if isinstance(t := values.get("loss.temperature"), int | float)}
    fixed = any(text.startswith("teacher.temperatures=") for text in overrides) or any(
        "teacher.temperatures" in values for values in points.values()
    )
    more = sorted(asked - set(base.teacher.temperatures))
    if more and not fixed and base.teacher.mode == "offline":
        found.append(f"teacher.temperatures={json.dumps([*base.teacher.temperatures, *more])}")
    return found
