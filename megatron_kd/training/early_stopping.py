"""The best evaluation of a run, and whether to wait for a better one. All of it is read from ``evaluations/``.

Nothing is remembered elsewhere: evaluations behind the iteration a run resumes from are dropped, so that what is left
leads to the same decision as before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.config import Recipe
from megatron_kd.errors import CheckpointError
from megatron_kd.training.checkpoint import list_checkpoints

METRIC = "eval/kd"


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        iteration: of the first evaluation that none after it improved upon.
        kd: its ``eval/kd``.
        since: evaluations after it.
    """

    iteration: int
    kd: float
    since: int


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """(iteration, eval/kd) of the evaluations of a run, in order; one that is not a number counts as infinitely bad.

    Those measured otherwise than the newest (on other targets, rows, or another divergence) are left out.
    """
    found, measures = [], {}
    for path in (run_dir / "evaluations").glob("iter_*.json"):
        number = path.stem.removeprefix("iter_")
        try:
            kept = json.loads(path.read_text())
            kd = kept[METRIC]
        except (ValueError, KeyError, TypeError):
            continue
        if number.isdigit():
            found.append((int(number), kd if isinstance(kd, float) and math.isfinite(kd) else math.inf))
            measures[int(number)] = kept.get("measure")
    newest = measures[max(measures)] if measures else None
    return sorted(entry for entry in found if measures[entry[0]] == newest)


def best_of(history: Sequence[tuple[int, float]], min_delta: float = 0.0) -> Best | None:
    """The best of a history: an evaluation must be lower by more than ``min_delta`` nats to be better."""
    best: Best | None = None
    for iteration, kd in history:
        if best is None or kd < best.kd - min_delta:
            best = Best(iteration, kd, 0)
        else:
            best = Best(best.iteration, best.kd, best.since + 1)
    return best


def exhausted(recipe: Recipe, run_dir: Path, iteration: int) -> str | None:
    """Why a run at this iteration is to end; None where it goes on, or does not stop early at all."""
    policy = recipe.training.early_stopping
    if policy is None:
        return None
    best = best_of(_periodic(recipe, run_dir, iteration), policy.min_delta)
    if best is None or best.since < policy.patience:
        return None
    return (
        f"stopped early at iteration {iteration}: eval/kd {best.kd:.6g} of iteration {best.iteration} was not improved "
        f"upon in {best.since} evaluations"
    )


def best_iteration(recipe: Recipe, run_dir: Path, iteration: int) -> int | None:
    """Where an early-stopping run has its best evaluation up to an iteration; None before the first."""
    policy = recipe.training.early_stopping
    best = None if policy is None else best_of(_periodic(recipe, run_dir, iteration), policy.min_delta)
    return None if best is None else best.iteration


def protected_checkpoint(recipe: Recipe, run_dir: Path, iteration: int) -> Path | None:
    """The checkpoint of an early-stopping run that is kept whatever its age; None where there is none."""
    best = best_iteration(recipe, run_dir, iteration)
    return None if best is None else dict(list_checkpoints(run_dir)).get(best)


def _periodic(recipe: Recipe, run_dir: Path, iteration: int) -> list[tuple[int, float]]:
    """The evaluations that the loop made: others, of the command ``evaluate``, must not shorten its patience."""
    every = recipe.training.eval_interval
    return [(at, kd) for at, kd in evaluations(run_dir) if at <= iteration and at % every == 0]


def find_best(run_dir: Path) -> Path:
    """The checkpoint with the lowest eval/kd of those that were evaluated.

    Raises:
        CheckpointError: none was.
    """
    saved = dict(list_checkpoints(run_dir))
    best = best_of([(at, kd) for at, kd in evaluations(run_dir) if at in saved])
    if best is None:
        raise CheckpointError(
            f"none of the checkpoints in {run_dir / 'checkpoints'} was evaluated: set training.eval_interval to a "
            "multiple of checkpoint.save_interval, or leave --best out"
        )
    return saved[best.iteration]
