"""``convert import``: Hugging Face weights become a Megatron distributed checkpoint, the tokenizer beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_kd.config import ParallelismConfig, Recipe
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.device import init_distributed, select_device
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import check_same_architecture, read_note, save_weights
from megatron_kd.models.counts import count_parameters
from megatron_kd.models.hf_source import open_hf_weights, resolve_source, weights_sha256
from megatron_kd.models.load import load_hf_weights
from megatron_kd.models.parallel import init_model_parallel

TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class ImportReport:
    """What ``convert import`` left behind. ``reused``: it was there already and of the same model."""

    checkpoint: Path
    parameters: int
    weights_sha256: str
    reused: bool

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**self.__dict__, "checkpoint": str(self.checkpoint)}


def import_model(recipe: Recipe, role: Literal["teacher", "student"], *, show_progress: bool = True) -> ImportReport:
    """Imports the model of one role from its ``model.hf`` into its ``checkpoint``, in one process on the CPU.

    The checkpoint loads in any parallel layout afterwards. Weights are kept in float32; the precision of a run is
    applied when it loads them.

    Raises:
        ConfigError: the recipe names no source or no destination, or the source does not exist.
        CheckpointError: the source is of another architecture, or the destination holds another model.
    """
    part = recipe.teacher if role == "teacher" else recipe.student
    model, destination = part.model, part.checkpoint
    if destination is None:
        raise ConfigError(f"{role}.checkpoint is not set: name the folder to import into")
    path = Path(destination)
    if path.exists():
        note = read_note(path)
        check_same_architecture(path, note, model)
        _check_same_source(path, note, model.hf)
        return ImportReport(path, int(note["parameters"]), note["weights_sha256"], reused=True)
    if model.hf is None:
        raise ConfigError(f"{role}.model.hf is not set: name a folder of safetensors or a GGUF file to import from")
    source = resolve_source(model.hf)
    tokenizer = load_tokenizer(source)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source} has {tokenizer.vocab_size} tokens, "
            f"{role}.model.vocab_size is {model.vocab_size}"
        )
    weights = open_hf_weights(model.hf)
    select_device("cpu")
    init_distributed()
    layout = ParallelismConfig()
    groups = init_model_parallel(layout, recipe.seed)
    built = build_model(model, layout, groups, "fp32", trainable=False)
    load_hf_weights(built, model, weights, groups, show=show_progress)
    note = {
        "source": model.hf,
        "weights_sha256": weights_sha256(weights),
        "tokenizer": tokenizer.identity(),
        "parameters": count_parameters(model, groups).total,
    }
    save_weights(built, model, path, note, before_publishing=lambda folder: tokenizer.save(folder / TOKENIZER_FOLDER))
    return ImportReport(path, note["parameters"], note["weights_sha256"], reused=False)


def _check_same_source(path: Path, note: dict[str, Any], source: str | None) -> None:
    """A checkpoint is reused only for the weights it was made from: a base model and its chat model look alike."""
    if not {"source", "parameters", "weights_sha256"} <= note.keys():
        raise CheckpointError(f"{path} exists and is not an imported model: choose another folder to import into")
    if source is not None and note["source"] != source and Path(note["source"]).resolve() != Path(source).resolve():
        raise CheckpointError(
            f"{path} was imported from {note['source']!r}, the recipe names {source!r}: "
            "choose another checkpoint folder, or remove this one"
        )


def tokenizer_source(recipe: Recipe) -> Path:
    """Where a recipe's tokenizer lies: data.tokenizer, the imported teacher's folder, or the teacher's source.

    Raises:
        ConfigError: none of them is set or exists.
    """
    if recipe.data.tokenizer is not None:
        return Path(recipe.data.tokenizer)
    if recipe.teacher.checkpoint is not None:
        imported = Path(recipe.teacher.checkpoint) / TOKENIZER_FOLDER
        if imported.is_dir():
            return imported
    if recipe.teacher.model.hf is None:
        raise ConfigError("no tokenizer: set data.tokenizer to a Hugging Face folder or a GGUF file")
    return resolve_source(recipe.teacher.model.hf)
