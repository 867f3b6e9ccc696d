"""``convert export``: a checkpoint, or the newest one of a run, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kd.config import Recipe, load_recipe
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.checkpoint import read_note
from megatron_kd.models.checkpoint_files import check_content
from megatron_kd.models.checkpoint_tensors import CheckpointWeights
from megatron_kd.models.convert import TOKENIZER_FOLDER, tokenizer_source
from megatron_kd.models.export import ExportReport, export_weights
from megatron_kd.models.hf_files import CONFIG
from megatron_kd.models.hf_source import resolve_source
from megatron_kd.training.checkpoint import list_checkpoints
from megatron_kd.training.early_stopping import find_best

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Origin:
    """What is to be exported, and where its tokenizer and its Hugging Face configuration lie."""

    checkpoint: Path
    tokenizer: Path
    kept_from: Path | None


def find_origin(source: Path, tokenizer: Path | None = None, *, best: bool = False) -> Origin:
    """Looks behind a path: an imported checkpoint, a training checkpoint, or a run directory (its newest checkpoint).

    A training checkpoint has the tokenizer and the configuration of the models that its run's recipe names.

    Args:
        tokenizer: taken instead of the one that belongs to the checkpoint.
        best: of a run, the checkpoint with the lowest eval/kd instead of the newest.

    Raises:
        CheckpointError: there is no checkpoint, or none that was evaluated.
        ConfigError: the best of what is no run; or its tokenizer is not found.
    """
    if not source.exists():
        raise CheckpointError(f"no checkpoint at {source}: correct the path")
    run = source if (source / RECIPE).exists() else None
    if run is not None:
        saved = list_checkpoints(run)
        if not saved:
            raise CheckpointError(f"the run {run} has no checkpoint yet: train it, or name a checkpoint")
        source = find_best(run) if best else saved[-1][1]
    elif best:
        raise ConfigError(f"--best is for a run directory, and {source} is none: leave it out")
    elif source.parent.name == "checkpoints" and (source.parent.parent / RECIPE).exists():
        run = source.parent.parent
    if run is None:
        read_note(source)  # says so where it is no checkpoint
        own = source / TOKENIZER_FOLDER
        if tokenizer is None and not own.is_dir():
            raise ConfigError(f"{source} has no folder {TOKENIZER_FOLDER!r}: give --tokenizer, a Hugging Face folder")
        return Origin(source, tokenizer or own, source if (source / CONFIG).exists() else None)
    recipe = load_recipe(run / RECIPE, [])
    folders = (folder for folder in _folders(recipe) if (folder / CONFIG).exists())
    return Origin(source, tokenizer or tokenizer_source(recipe), next(folders, None))


def _folders(recipe: Recipe) -> Iterator[Path]:
    for checkpoint in (recipe.student.checkpoint, recipe.teacher.checkpoint):
        if checkpoint is not None:
            yield Path(checkpoint)
    for model in (recipe.student.model, recipe.teacher.model):
        try:
            if model.hf is not None:
                yield resolve_source(model.hf)
        except ConfigError:  # no longer there: then the special tokens are the tokenizer's
            continue


def export(
    source: Path,
    output: Path,
    *,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    best: bool = False,
    show_progress: bool = True,
) -> ExportReport:
    """Exports in one process, without a model and without collectives; see ``models.export.export_weights``.

    Raises:
        CheckpointError, ConfigError, DataError: no checkpoint, a damaged one, no tokenizer, or the output exists.
    """
    origin = find_origin(source, tokenizer, best=best)
    weights = CheckpointWeights(origin.checkpoint)
    # A flipped bit does not show in a tensor: whoever has the export has nothing to compare it with.
    check_content(origin.checkpoint, weights.note.get("files", {}), 0, 1)
    return export_weights(
        weights,
        weights.model,
        output,
        tokenizer=load_tokenizer(origin.tokenizer),
        kept_from=origin.kept_from,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        show_progress=show_progress,
    )
