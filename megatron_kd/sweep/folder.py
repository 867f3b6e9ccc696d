"""The folder of a sweep: the run directories of its points, and ``_sweep`` with what belongs to all of them.

``_sweep/recipes/<point>.yaml`` is what each point trains, resolved; ``_sweep/status.json``, ``_sweep/compare.html``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_kd.config import Recipe, dump_recipe, recipe_differences
from megatron_kd.config.sweep import Point, Sweep
from megatron_kd.config.yaml_text import parse_yaml, read_mapping
from megatron_kd.errors import ConfigError
from megatron_kd.files import write_atomic
from megatron_kd.status import has_begun

OWN = "_sweep"
"""No point can have this name."""
# What a finished run may differ in from its point: how it ran, not what it learnt.
_HOW = (
    "checkpoint.",
    "cluster.",
    "logging.",
    "parallelism.",
    "data.num_workers",
    "data.prefetch_batches",
    "teacher.temperatures",
    "teacher.capture.",
    "teacher.model.hf",
    "student.model.hf",
    "training.threads",
    "training.recompute_",
)


@dataclass(frozen=True)
class State:
    """How far a point is.

    Attributes:
        name: waiting, running (or killed), stopped, failed or finished.
        iteration: of its newest checkpoint.
    """

    name: str
    iteration: int = 0


def status_file(sweep: Sweep) -> Path:
    """State of the sweep as a whole."""
    return sweep.run_dir / OWN / "status.json"


def write_recipe(sweep: Sweep, name: str, recipe: Recipe) -> Path:
    """Writes a resolved recipe below the sweep's folder; its path."""
    path = sweep.run_dir / OWN / "recipes" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, dump_recipe(recipe))
    return path


def state_of(point: Point) -> State:
    """The state of a point by its run's status.json; waiting where there is none that can be read."""
    try:
        found: Any = json.loads((Path(point.recipe.run_dir) / "status.json").read_text())
    except (OSError, ValueError):
        return State("waiting")
    if not isinstance(found, dict) or not isinstance(found.get("iteration"), int):
        return State("waiting")
    name, iteration = str(found.get("state")), int(found["iteration"])
    if name == "finished" and iteration < point.recipe.training.train_iters and found.get("reason") is None:
        name = "stopped"  # its recipe has become longer since; one that stopped early says why
    return State(name, iteration)


def check_trained(points: list[Point]) -> None:
    """Raises ConfigError where a run was trained, to its end or not, by another recipe than its point now has.

    It may have become longer; the recipe of a run that has not made a step may have been the mistake.
    """
    problems = []
    for point in points:
        run_dir = Path(point.recipe.run_dir)
        stored = run_dir / "recipe.yaml"
        if not stored.is_file() or not has_begun(run_dir):
            continue
        now = parse_yaml(dump_recipe(point.recipe), "the recipe")
        changed = [
            f"{key} {before!r}, now {after!r}"
            for key, before, after in recipe_differences(read_mapping(stored), now)
            if not key.startswith(_HOW) and not (key == "training.train_iters" and _is_longer(before, after))
        ]
        if changed:
            problems.append(f"{point.recipe.run_dir} was trained with {', '.join(changed)}")
    if problems:
        raise ConfigError(
            f"{'; '.join(problems)}: remove what is to be trained again, or give the sweep another name or run_dir"
        )


def _is_longer(before: Any, after: Any) -> bool:
    return isinstance(before, int) and isinstance(after, int) and after > before
