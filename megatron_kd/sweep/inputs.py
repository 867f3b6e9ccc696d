"""What the points of a sweep read, made once for all that share it: checkpoints, samples, caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_kd.cache.store import cache_exists, missing_samples, open_cache
from megatron_kd.config import Recipe
from megatron_kd.config.messages import explain
from megatron_kd.config.sweep import Point, Sweep
from megatron_kd.errors import CacheError, ConfigError

# Of data: what train alone looks at, so that points may differ in it and share their samples.
_READING = {"train_tokens", "shuffle", "prefetch_batches", "num_workers"}


@dataclass(frozen=True)
class Inputs:
    """Checkpoints, samples and a cache that some points share.

    Attributes:
        name: of the file that its recipe is written to.
        points: their names.
        recipe: what makes all of it for all of them and the base: the largest top_k, every temperature, most tokens.
        captures: whether one of them trains on the cache.
    """

    name: str
    points: list[str]
    recipe: Recipe
    captures: bool

    def missing(self) -> Iterator[list[str]]:
        """The commands that make what is not there yet, in order, each as words before the recipe.

        A command is looked for when the one before it is done.

        Raises:
            CacheError: a cache that is there and keeps too little for the points; names the key.
        """
        recipe, teacher, student = self.recipe, self.recipe.teacher, self.recipe.student
        loads = teacher.mode == "online" or student.from_teacher is not None
        cache_is_missing = self.captures and not self.cache_is_complete()
        loads = loads or (cache_is_missing and teacher.engine == "megatron")
        if loads and teacher.model.hf is not None and _is_absent(teacher.checkpoint):
            yield ["convert", "import"]
        if student.model.hf is not None and _is_absent(student.checkpoint):
            yield ["convert", "import", "--role=student"]
        if recipe.data.corpus is not None and not (Path(recipe.data.samples) / "samples.json").is_file():
            yield ["prepare"]
        if cache_is_missing:
            yield ["capture"]

    def cache_is_complete(self) -> bool:
        """Whether every row is in the cache. Raises CacheError where it keeps too little for the points."""
        teacher = self.recipe.teacher
        if teacher.cache is None or not cache_exists(teacher.cache):
            return False
        cache = open_cache(teacher.cache)
        kept, at = cache.manifest.top_k, set(cache.manifest.temperatures)
        if teacher.top_k > kept or not at.issuperset(teacher.temperatures):
            raise CacheError(
                f"{teacher.cache} keeps {kept} tokens a position at the temperatures {sorted(at)}, the sweep needs "
                f"{teacher.top_k} at {teacher.temperatures}: give it another teacher.cache, or remove this one"
            )
        return not missing_samples(cache)

    def for_capture(self) -> Recipe:
        """The recipe as a cache that is there was begun: it is gone on with, though it keeps more."""
        teacher = self.recipe.teacher
        if teacher.cache is None or not cache_exists(teacher.cache):
            return self.recipe
        manifest = open_cache(teacher.cache).manifest
        update = {"top_k": manifest.top_k, "temperatures": list(manifest.temperatures)}
        return self.recipe.model_copy(update={"teacher": teacher.model_copy(update=update)})


def inputs_of(sweep: Sweep) -> list[Inputs]:
    """What the points read, in the order of the points that name it first.

    Raises:
        ConfigError: points share a folder and want different things in it.
    """
    problems = [
        *_conflicts(sweep.points, "data.samples", _makes_samples),
        *_conflicts([p for p in sweep.points if p.recipe.teacher.mode == "offline"], "teacher.cache", _makes_cache),
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    groups: dict[tuple[str | None, ...], list[Point]] = {}
    for point in sweep.points:
        recipe = point.recipe
        key = (recipe.data.samples, recipe.teacher.cache, recipe.teacher.checkpoint, recipe.student.checkpoint)
        groups.setdefault(key, []).append(point)
    return [_joined(sweep, points, number) for number, points in enumerate(groups.values(), start=1)]


def _joined(sweep: Sweep, points: Sequence[Point], number: int) -> Inputs:
    offline = [point for point in points if point.recipe.teacher.mode == "offline"]
    of = (offline or list(points))[0].recipe
    wanted = of.model_dump(mode="json")
    # Every point with these samples, whatever cache it reads: they are prepared once.
    tokens = [p.recipe.data.train_tokens for p in sweep.points if p.recipe.data.samples == of.data.samples]
    wanted["data"]["train_tokens"] = None if None in tokens else max(token for token in tokens if token is not None)
    wanted["name"] = f"{sweep.name}_inputs_{number}"
    if offline:
        # The base's own too: another sweep of it, or the base itself, shall find what it asks for.
        teachers = [point.recipe.teacher for point in offline]
        if sweep.base.teacher.cache == of.teacher.cache:
            teachers.insert(0, sweep.base.teacher)
        wanted["teacher"]["top_k"] = max(teacher.top_k for teacher in teachers)
        wanted["teacher"]["temperatures"] = list(dict.fromkeys(t for each in teachers for t in each.temperatures))
    try:
        recipe = Recipe.model_validate(wanted, context={"trains": False})
    except ValidationError as error:
        names = ", ".join(point.name for point in points)
        raise ConfigError(explain(error, Recipe, lambda key: f"inputs of {names}", f"inputs of {names}")) from None
    return Inputs(f"_inputs_{number}", [point.name for point in points], recipe, bool(offline))


def _is_absent(path: str | None) -> bool:
    return path is not None and "://" not in path and not Path(path).exists()


def _makes_samples(recipe: Recipe) -> dict[str, Any]:
    data = recipe.data.model_dump(mode="json")
    return {f"data.{key}": value for key, value in data.items() if key not in _READING}


def _makes_cache(recipe: Recipe) -> dict[str, Any]:
    teacher = recipe.teacher
    return {
        "data.samples": recipe.data.samples,
        "teacher.model": teacher.model.name,
        "teacher.engine": teacher.engine,
        "teacher.capture.value_dtype": teacher.capture.value_dtype,
        "teacher.checkpoint": teacher.checkpoint,
    }


def _conflicts(points: Sequence[Point], key: str, makes: Any) -> Iterator[str]:
    """A sentence for each folder that two points want filled differently."""
    section, name = key.split(".")
    first: dict[str, Point] = {}
    said: set[str] = set()
    for point in points:
        folder = getattr(getattr(point.recipe, section), name)
        other = first.setdefault(folder, point)
        ours, theirs = makes(point.recipe), makes(other.recipe)
        unlike = [field for field in ours if ours[field] != theirs[field]]
        if unlike and folder not in said:
            said.add(folder)
            yield (
                f"the points {other.name} and {point.name} share {key} {folder}, but differ in {', '.join(unlike)}: "
                f"give each its own {key}"
            )
