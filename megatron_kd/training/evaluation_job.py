"""``evaluate``: a run's newest checkpoint, or the student a recipe starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_kd.config import Recipe
from megatron_kd.device import fail_together, first_rank_tells
from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint import load_weights
from megatron_kd.status import has_begun
from megatron_kd.training.checkpoint import read_progress
from megatron_kd.training.early_stopping import find_best
from megatron_kd.training.evaluate import evaluate_model, write_evaluation
from megatron_kd.training.evaluation_details import EvaluationDetails
from megatron_kd.training.resume import newest_checkpoint
from megatron_kd.training.session import open_session
from megatron_kd.training.setup import build_student


def evaluate(
    recipe: Recipe, run_dir: Path | None, *, keep: bool = True, best: bool = False, show_progress: bool = True
) -> dict[str, Any]:
    """Evaluates on this rank, details included, and keeps the result in the run directory. Collective over all ranks.

    Args:
        run_dir: evaluates its newest checkpoint; None evaluates what the recipe starts with, as iteration 0.
        best: the checkpoint with the lowest eval/kd so far instead of the newest.
        keep: False where the recipe is not the run's own: its figures must not pass for those of the run.

    Returns:
        The means of ``evaluate_model``, those of ``EvaluationDetails`` and its tables.

    Raises:
        CheckpointError: the run has no checkpoint yet, or none that was evaluated.
    """
    session = open_session(recipe, for_evaluation=True)
    if run_dir is None:
        # What a run that has begun started from was measured when it did.
        keep = keep and not has_begun(Path(recipe.run_dir))
        student = build_student(recipe, session.groups)
        place = {"iteration": 0, "tokens": 0}
    else:
        run = run_dir
        saved = first_rank_tells("looking for the best", lambda: find_best(run)) if best else newest_checkpoint(run)
        with fail_together(f"looking into {run_dir}"):
            if saved is None:
                raise CheckpointError(f"{run_dir} has no checkpoint: train it first, or evaluate its recipe")
            place = read_progress(saved)
        student = build_student(recipe, session.groups, with_weights=False)
        load_weights(student, recipe.student.model, saved)
    details = EvaluationDetails(recipe, session.evaluation, session.groups)
    result: dict[str, Any] = evaluate_model(
        student,
        session.evaluation,
        session.samples,
        session.evaluation_cached,
        session.groups,
        recipe.training.micro_batch_size,
        num_workers=recipe.data.num_workers,
        show_progress=show_progress,
        observe=details.observe,
    )
    means, tables = details.finish()
    result |= {**means, **tables}
    with fail_together("writing the evaluation"):
        if session.is_first and keep:
            write_evaluation(
                run_dir or Path(recipe.run_dir),
                place["iteration"],
                place["tokens"],
                result,
                recipe,
                from_cache=session.evaluation_cached is not None,
            )
    dist.barrier()
    return result
