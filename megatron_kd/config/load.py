"""From files and overrides to a checked recipe, and back to text."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_kd.config.base import expand_variables
from megatron_kd.config.merge import Key, Layered, Whole, without_resets
from megatron_kd.config.messages import explain
from megatron_kd.config.model import ModelConfig
from megatron_kd.config.schema import Recipe
from megatron_kd.config.yaml_text import parse_yaml, read_mapping, to_yaml
from megatron_kd.errors import ConfigError

TEACHER_MODEL: Key = ("teacher", "model")
STUDENT_MODEL: Key = ("student", "model")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, trains: bool = True) -> Recipe:
    """Loads a recipe: the files it extends, its own keys, then the overrides; later ones win.

    Mappings merge key by key, lists are replaced, ``null`` resets a key to its default.

    Args:
        path: the recipe's file.
        overrides: ``dotted.key=value``, the value in YAML.
        trains: whether it is for training steps; a capture may have a layout whose ranks do not divide the batch.

    Raises:
        ConfigError: one line with everything that is wrong, each with its key and the file or override it came from.
    """
    path = Path(path)
    tree = _read(path, "", ())
    for override in overrides:
        _apply(tree, override, path.parent)
    try:
        return Recipe.model_validate(without_resets(tree.values), context={"trains": trains})
    except ValidationError as error:
        raise ConfigError(explain(error, Recipe, lambda key: tree.source(key, str(path)), str(path))) from None


def load_model(name: str, folder: str | Path = ".") -> ModelConfig:
    """Loads an architecture by its name (see ``find_model``) or the path of its file. Raises ConfigError."""
    path = find_model(name, Path(folder), "asked for by name")
    tree = _read(path, "", ())
    try:
        return ModelConfig.model_validate(without_resets(tree.values))
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, lambda key: tree.source(key, str(path)), str(path))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that depends on no other file and that ``load_recipe`` reads back equal."""
    return to_yaml(recipe.model_dump(mode="json"))


def find_model(name: str, folder: Path, asked_by: str) -> Path:
    """Finds ``configs/models/<name>.yaml`` in ``folder``, its parents, or the root of this package's repository.

    A name with a slash or ending in .yaml is a path relative to ``folder``.

    Raises:
        ConfigError: naming the known models, where there is none of that name.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        return folder / expand_variables(name)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise ConfigError(f"{name!r} is no name of a model ({asked_by}): letters, digits, dot, underscore and hyphen")
    repository = Path(__file__).resolve().parents[2]
    shelves = [root / "configs" / "models" for root in (*_upwards(folder), repository)]
    for shelf in shelves:
        if (shelf / f"{name}.yaml").is_file():
            return shelf / f"{name}.yaml"
    known = sorted({file.stem for shelf in shelves if shelf.is_dir() for file in shelf.glob("*.yaml")})
    raise ConfigError(
        f"no model {name!r} ({asked_by}): no configs/models/{name}.yaml from {folder.resolve()} upwards; "
        f"known models: {', '.join(known) or 'none'}"
    )


def _upwards(folder: Path) -> tuple[Path, ...]:
    folder = folder.resolve()
    return (folder, *folder.parents)


def _read(path: Path, asked_by: str, chain: tuple[Path, ...]) -> Layered:
    """One file with all that it extends; ``chain`` holds the files that led here."""
    here = path.resolve()
    if here in chain:
        loop = " → ".join(str(file) for file in (*chain[chain.index(here) :], here))
        raise ConfigError(f"extends goes in a circle: {loop}: remove one of these")
    own = read_mapping(path, asked_by)
    if "base" in own and own.keys() & {"grid", "runs"}:
        raise ConfigError(f"{path} is a sweep: run it with megatron-kd sweep, or name the recipe in its base")
    tree = Layered()
    for parent in _parents(own.pop("extends", None), path):
        tree.merge_layered(_read(parent, f"extended by {path}", (*chain, here)))
    _resolve_names(own, path.parent, str(path))
    tree.merge(own, str(path))
    return tree


def _parents(extends: Any, path: Path) -> list[Path]:
    names = [] if extends is None else [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: extends must be the path of a file or a list of them, not {extends!r}")
    try:
        return [Path(os.path.normpath(path.parent / expand_variables(name))) for name in names]
    except ValueError as error:
        raise ConfigError(f"{path}: extends: {error}") from None


def _resolve_names(values: dict[str, Any], folder: Path, source: str) -> None:
    """Replaces the names of models among the keys of one file or override by the models' own mappings, in place."""
    for section, key in (TEACHER_MODEL, STUDENT_MODEL):
        role = values.get(section)
        if isinstance(role, dict) and isinstance(role.get(key), str):
            role[key] = _read_model(role[key], folder, f"{section}.{key} in {source}")


def _read_model(name: str, folder: Path, asked_by: str) -> Whole:
    try:
        path = find_model(name, folder, asked_by)
    except ValueError as error:
        raise ConfigError(f"{asked_by}: {error}") from None
    tree = _read(path, asked_by, ())
    return Whole(tree.values, tree.sources)


def _apply(tree: Layered, override: str, folder: Path) -> None:
    """Lays one ``dotted.key=value`` over the tree."""
    dotted, equals, text = override.partition("=")
    key = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(key):
        raise ConfigError(f"override {override!r}: write dotted.key=value, such as optimizer.lr=1e-5")
    source = f"override {override!r}"
    if key[0] == "extends":
        raise ConfigError(f"{source}: extends belongs into a file")
    nested = parse_yaml(text, source)
    for name in reversed(key):
        nested = {name: nested}
    _resolve_names(nested, folder, source)
    # A key of a student's model that is not spelt out changes a copy of what it would have been: the teacher's model.
    inherited = tree.get(TEACHER_MODEL)
    if key[:2] == STUDENT_MODEL and len(key) > 2 and tree.get(STUDENT_MODEL) is None and isinstance(inherited, dict):
        tree.merge({"student": {"model": Whole(inherited)}}, source)
    tree.merge(nested, source)
