"""Reading run directories: text files only, whatever state the run is in."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_kd.config.yaml_text import read_mapping
from megatron_kd.errors import KDError

ENVIRONMENT_KEY = "environment"
"""Where wandb's configuration of a run keeps versions, revision and hardware, beside the sections of the recipe."""
WANDB_RUN = "wandb_run.json"
RECIPE, ENVIRONMENT, METRICS, EVALUATIONS = "recipe.yaml", "environment.json", "metrics.jsonl", "evaluations"


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind.

    Attributes:
        place: the run directory, wandb folder or address that it was read from.
        recipe: the resolved recipe, empty where the file is missing.
        environment: versions, revision and hardware, empty where the file is missing.
        metrics: one mapping per logged iteration, in rising order. An iteration may have several lines: a step and
            its evaluation, or the same step before and after a resume, where the later one counts.
        evaluations: one mapping per evaluation, by rising iteration.
        notes: what was missing or could not be read, a sentence each.
        wandb_id: the id of its run on wandb, None where there is none.
    """

    place: str
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wandb_id: str | None = None

    def setting(self, dotted: str) -> Any:
        """A value of the recipe by its dotted key, None where it is not there."""
        value: Any = self.recipe
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def world_size(self) -> int | None:
        """Ranks of the run, as the recipe has them."""
        nodes, per_node = self.setting("cluster.nodes"), self.setting("cluster.gpus_per_node")
        return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """A metric over trained tokens: (tokens, values), where both are finite numbers."""
        return _series(self.metrics, key)

    def evaluation_series(self, key: str) -> tuple[list[float], list[float]]:
        """A metric of the held-out split over trained tokens: (tokens, values)."""
        return _series(self.evaluations, key)


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    pairs = [(number(row.get("tokens")), number(row.get(key))) for row in rows]
    known = [(tokens, value) for tokens, value in pairs if tokens is not None and value is not None]
    return [tokens for tokens, _ in known], [value for _, value in known]


def number(value: Any) -> float | None:
    """A finite number as a float, everything else (absent, text, NaN, infinite) as None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_run(directory: str | Path) -> RunRecord:
    """Reads a run directory, finished, interrupted or still running.

    Raises:
        KDError: when the directory does not exist or holds neither recipe.yaml nor metrics.jsonl.
        ConfigError: when recipe.yaml is not YAML.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise KDError(f"{directory}: no such run directory: give the run_dir of a recipe that was trained")
    if not (directory / RECIPE).is_file() and not (directory / METRICS).is_file():
        raise KDError(f"{directory}: not a run directory, it holds neither {RECIPE} nor {METRICS}")
    notes: list[str] = []
    recipe: dict[str, Any] = {}
    if (directory / RECIPE).is_file():
        recipe = read_mapping(directory / RECIPE)
    else:
        notes.append(f"{directory / RECIPE} is missing: method and layout are unknown")
    environment = _read_object(directory / ENVIRONMENT, notes)
    metrics = _read_metrics(directory / METRICS, notes)
    notes += _of_no_number(metrics, str(directory / METRICS))
    wandb = directory / WANDB_RUN
    identity = _read_object(wandb, notes).get("id") if wandb.is_file() else None
    evaluations = [_read_object(path, notes) for path in sorted((directory / EVALUATIONS).glob("iter_*.json"))]
    return RunRecord(
        place=str(directory),
        recipe=recipe,
        environment=environment,
        metrics=[_in_nats(row, recipe) for row in _by_iteration(metrics)],
        evaluations=_by_iteration(evaluations),
        notes=notes,
        wandb_id=identity if isinstance(identity, str) else None,
    )


def run_of_records(
    place: str,
    wandb_id: str,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    notes: list[str] | None = None,
) -> RunRecord:
    """A run as wandb has it: its configuration and all that was logged, in the order of logging.

    Args:
        config: the recipe, with ``environment`` beside its sections.
    """
    recipe = {key: value for key, value in config.items() if key not in ("_wandb", ENVIRONMENT_KEY)}
    environment = config.get(ENVIRONMENT_KEY)
    notes = list(notes or [])
    rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    if not any(number(row.get("iteration")) is not None for row in rows):
        notes.append(f"{place} holds no metrics yet")
    if not recipe:
        notes.append(f"{place} holds no recipe: method and layout are unknown")
    notes += _of_no_number(rows, place)
    return RunRecord(
        place=place,
        recipe=recipe,
        environment=environment if isinstance(environment, dict) else {},
        metrics=[_in_nats(row, recipe) for row in _by_iteration(rows)],
        evaluations=_by_iteration([row for row in rows if "eval/kd" in row]),
        notes=notes,
        wandb_id=wandb_id,
    )


def _of_no_number(rows: list[dict[str, Any]], place: str) -> list[str]:
    """A note where the loss was NaN or infinite: the curve has a hole there, and the training went wrong."""
    bad = [row.get("iteration") for row in rows if "loss/kd" in row and number(row["loss/kd"]) is None]
    if not bad:
        return []
    steps = "iteration" if len(bad) == 1 else f"{len(bad)} iterations, the first"
    return [f"{place}: loss/kd is no finite number at {steps} {bad[0]}; left out"]


def _in_nats(row: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Adds ``kd``, the divergence without the T² that scales the loss: evaluations are in that unit."""
    loss, kd = recipe.get("loss"), number(row.get("loss/kd"))
    if kd is None:
        return row
    temperature = number(loss.get("temperature")) if isinstance(loss, dict) and loss.get("scale_by_t2", True) else None
    return {**row, "kd": kd / (temperature or 1.0) ** 2}


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path} is missing")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path} cannot be read and is left out: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path} holds no object and is left out")
        return {}
    return value


def _read_metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        notes.append(f"{path} is missing: nothing was trained yet")
        return []
    except OSError as error:
        notes.append(f"{path} cannot be read: {error}")
        return []
    rows, bad = [], []
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif count < len(lines):  # the last line may be half written: the run goes on, or was killed in it
            bad.append(str(count))
    if bad:
        notes.append(f"{path}: line {', '.join(bad)} is no JSON object and is left out")
    if not rows:
        notes.append(f"{path} holds no complete line yet")
    return rows


def _by_iteration(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[float, dict[str, Any]] = {}
    for row in rows:
        if (iteration := number(row.get("iteration"))) is not None:
            merged[iteration] = {**merged.get(iteration, {}), **row}
    return [merged[iteration] for iteration in sorted(merged)]
