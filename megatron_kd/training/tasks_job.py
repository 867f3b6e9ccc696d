"""``evaluate --tasks``: a run's newest checkpoint and its teacher on public tasks, one after the other."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_kd.config import Recipe
from megatron_kd.device import select_device
from megatron_kd.errors import CheckpointError, ConfigError, LaunchError
from megatron_kd.files import write_json
from megatron_kd.models.hf_files import CONFIG
from megatron_kd.models.hf_source import resolve_source
from megatron_kd.training.checkpoint import list_checkpoints, read_progress
from megatron_kd.training.early_stopping import find_best
from megatron_kd.training.export_job import export
from megatron_kd.training.task_scores import TaskSettings, load_tasks, require_harness, score, score_rows
from megatron_kd.versions import installed_versions

_SHARD_BYTES = 5 * 10**9


def evaluate_tasks(
    recipe: Recipe,
    run_dir: Path,
    settings: TaskSettings,
    *,
    best: bool = False,
    with_teacher: bool = True,
    keep: bool = True,
    keep_student: Path | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Scores the student, and beside it the teacher, in this one process; keeps the rows in the run directory.

    The models lie in memory one at a time, in the dtype of their weights.

    Args:
        best: the checkpoint with the lowest eval/kd so far instead of the newest.
        with_teacher: score ``teacher.model.hf`` too, or ``teacher.checkpoint`` where that is no folder of weights.
        keep: False where the recipe is not the run's own.
        keep_student: a folder for the exported student, which must not exist; None: it is removed afterwards.

    Returns:
        iteration, tokens, versions, teacher and ``scores``, the rows of ``score_rows``.

    Raises:
        LaunchError: started on several ranks.
        ConfigError, DataError, CheckpointError: the harness is missing, an unknown task, data that cannot be read, no
            checkpoint, or no weights of the teacher; all before a model is loaded.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError("evaluate --tasks runs in one process: start it without torchrun, with --spread for all GPUs")
    require_harness()
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        raise CheckpointError(f"{run_dir} has no checkpoint: train it first")
    saved = find_best(run_dir) if best else checkpoints[-1][1]
    place = read_progress(saved)
    select_device(recipe.cluster.gpu)
    tasks = load_tasks(settings)
    with _teacher_folder(recipe, run_dir, show_progress) if with_teacher else _nothing() as teacher:
        with _student_folder(saved, run_dir, keep_student, show_progress) as student:
            student_results = score(student, tasks, settings)
        teacher_results = None if teacher is None else score(teacher, tasks, settings)
    result = {
        "iteration": place["iteration"],
        "tokens": place["tokens"],
        "versions": installed_versions("lm-eval", "transformers", "torch"),
        "teacher": recipe.teacher.model.name if with_teacher else None,
        "scores": score_rows(student_results, teacher_results, settings),
    }
    if keep:
        _write(run_dir, result)
    return result


def tasks_path(run_dir: Path, iteration: int) -> Path:
    """Where the scores of an iteration lie."""
    return run_dir / "evaluations" / f"tasks_iter_{iteration:07d}.json"


def _write(run_dir: Path, result: dict[str, Any]) -> None:
    """Beside the scores of other tasks of the iteration; those of a task asked again are replaced."""
    path = tasks_path(run_dir, result["iteration"])
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = {row["task"] for row in result["scores"]}
    before: list[dict[str, Any]] = []
    if path.exists():
        try:
            before = json.loads(path.read_text())["scores"]
        except (ValueError, KeyError, TypeError):
            before = []
    others = [row for row in before if row["task"] not in asked]
    write_json(path, {**result, "scores": [*others, *result["scores"]]})


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@contextmanager
def _student_folder(saved: Path, run_dir: Path, kept: Path | None, show_progress: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".student_", dir=run_dir) as folder:
        output = kept or Path(folder) / "hf"
        export(saved, output, max_shard_bytes=_SHARD_BYTES, show_progress=show_progress)
        yield output


@contextmanager
def _teacher_folder(recipe: Recipe, run_dir: Path, show_progress: bool) -> Iterator[Path]:
    """The weights as they were published where they are at hand, else an export of the imported checkpoint."""
    published: Path | None = None
    if recipe.teacher.model.hf is not None:
        try:
            published = resolve_source(recipe.teacher.model.hf)
        except ConfigError:  # gone since the import
            published = None
    if published is not None and (published / CONFIG).is_file():
        yield published
        return
    checkpoint = recipe.teacher.checkpoint
    if checkpoint is not None and Path(checkpoint).is_dir():
        with tempfile.TemporaryDirectory(prefix=".teacher_", dir=run_dir) as folder:
            output = Path(folder) / "hf"
            export(Path(checkpoint), output, max_shard_bytes=_SHARD_BYTES, show_progress=show_progress)
            yield output
        return
    if published is not None and published.suffix == ".gguf":
        yield published
        return
    raise ConfigError(
        f"the teacher's weights are neither in teacher.model.hf {recipe.teacher.model.hf!r} nor in teacher.checkpoint "
        f"{checkpoint!r}: give teacher.model.hf=FOLDER, or --no-teacher"
    )
