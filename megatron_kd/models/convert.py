"""``convert import``: Hugging Face weights become a Megatron distributed checkpoint, the tokenizer beside them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_kd.config import ModelConfig, ParallelismConfig, Recipe
from megatron_kd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_kd.device import fail_together, first_rank_tells, init_distributed, lost_ranks_reported, select_device
from megatron_kd.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_kd.files import write_json
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import check_same_architecture, read_note, save_weights
from megatron_kd.models.checkpoint_files import check_files
from megatron_kd.models.families import EMBEDDING, HEAD
from megatron_kd.models.hf_config import check_architecture
from megatron_kd.models.hf_files import CONFIG, GENERATION_CONFIG
from megatron_kd.models.hf_source import HFWeights, open_hf_weights, resolve_source, weights_sha256
from megatron_kd.models.hf_source_pickle import SUFFIXES as PICKLE_SUFFIXES
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.load import load_hf_weights, stored_dtypes
from megatron_kd.models.parallel import ParallelGroups, init_model_parallel
from megatron_kd.models.parameters import places_in
from megatron_kd.models.transformer_config import Precision

TOKENIZER_FOLDER = "tokenizer"
_OF_THE_FILE = ("_name_or_path", "quantization_config")


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


def import_model(
    recipe: Recipe,
    role: Literal["teacher", "student"],
    *,
    allow_pickle: bool = False,
    show_progress: bool = True,
) -> ImportReport:
    """Imports the model of one role from its ``model.hf`` into its ``checkpoint``. Collective over all ranks.

    Alone it is done on the CPU, in the memory of one copy of the model; among several ranks in the recipe's layout (a
    teacher's own where it has one) and on its devices, each rank its shard. The checkpoint loads in any layout either
    way. Weights stay in the dtype they are stored in; the precision of a run is applied when it loads them. Beside them
    are kept the tokenizer, config.json and generation_config.json.

    Args:
        allow_pickle: see ``open_hf_weights``.

    Raises:
        ConfigError: the recipe names no source or no destination, or the source does not exist.
        CheckpointError: the source is damaged or of another architecture, or the destination holds another model.
        LaunchError: started among several ranks, but not those of the recipe.
    """
    if role == "teacher":
        recipe = recipe.in_teacher_layout()
    part = recipe.teacher if role == "teacher" else recipe.student
    model, destination = part.model, part.checkpoint
    if destination is None:
        raise ConfigError(f"{role}.checkpoint is not set: name the folder to import into")
    path = Path(destination)
    groups, layout = _join(recipe)
    there = first_rank_tells(f"looking into {path}", lambda: _already_there(path, model))
    if there is not None:
        return there
    if model.hf is None:
        raise ConfigError(
            f"{role}.model.hf is not set: add {role}.model.hf=FOLDER, of safetensors, or a GGUF file to import from"
        )
    show = show_progress and dist.get_rank() == 0
    with fail_together(f"reading {model.hf}"):
        source = resolve_source(model.hf)
        weights = open_hf_weights(model.hf, allow_pickle=allow_pickle)
        check_architecture(model, weights.config())
        dtypes = stored_dtypes(model, weights)
        tokenizer = _tokenizer(source, model, role) if dist.get_rank() == 0 else None
    # Each parameter gets the dtype of its source; most have it from the beginning, which leaves no holes in memory.
    precision: Precision = "fp32" if dtypes[EMBEDDING] == torch.float32 else "bf16"
    built = build_model(model, layout, groups, precision, trainable=False, initialize=False)
    with fail_together(f"reading {model.hf}"):
        load_hf_weights(built, model, weights, groups, dtypes=dtypes, show=show)
    note: dict[str, Any] = {
        "source": model.hf,
        "weights_sha256": first_rank_tells(f"hashing {model.hf}", lambda: weights_sha256(weights)),
        "tokenizer": None if tokenizer is None else tokenizer.identity(),
        "parameters": _count_parameters(built, model, groups),
    }

    def add_files(folder: Path) -> None:
        assert tokenizer is not None  # this is the first rank
        tokenizer.save(folder / TOKENIZER_FOLDER)
        _keep_configuration(source, weights, folder)

    save_weights(built, model, path, note, add_files, use_up=True)
    return ImportReport(path, note["parameters"], note["weights_sha256"], reused=False)


def _join(recipe: Recipe) -> tuple[ParallelGroups, ParallelismConfig]:
    """One rank on the CPU where nothing started more, else the recipe's. Collective."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return join_ranks(recipe), recipe.parallelism
    select_device("cpu")
    init_distributed()
    layout = ParallelismConfig()
    return init_model_parallel(layout, recipe.seed), layout


def _already_there(path: Path, model: ModelConfig) -> ImportReport | None:
    if not path.exists():
        return None
    note = read_note(path)
    check_same_architecture(path, note, model)
    _check_same_source(path, note, model.hf)
    try:
        check_files(path, note.get("files", {}))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}; remove it, and import again") from error
    return ImportReport(path, int(note["parameters"]), note["weights_sha256"], reused=True)


def _tokenizer(source: Path, model: ModelConfig, role: str) -> Tokenizer:
    """The source's tokenizer. Raises DataError where there is none, CheckpointError where it has too many tokens."""
    folder = source.parent if source.suffix in PICKLE_SUFFIXES else source
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, {role}.model.vocab_size is "
            f"{model.vocab_size}: the embedding has no rows for the others; use the tokenizer of these weights"
        )
    return tokenizer


def _keep_configuration(source: Path, weights: HFWeights, folder: Path) -> None:
    """Hugging Face's own configuration, for an export: special tokens are not in ours."""
    origin = source if source.is_dir() else source.parent
    if source.suffix == ".gguf":
        # As transformers made it of the file: not where that lies, nor that it was quantised.
        config = {key: value for key, value in weights.config().items() if key not in _OF_THE_FILE}
        write_json(folder / CONFIG, config)
        return
    for name in (CONFIG, GENERATION_CONFIG):
        if (origin / name).exists():
            shutil.copyfile(origin / name, folder / name)


def _count_parameters(built: GPTModel, model: ModelConfig, groups: ParallelGroups) -> int:
    """Parameters of the whole model, shared ones once and without padding of the vocabulary. Collective."""
    sizes: dict[str, int] = {}
    for place, parameter in places_in(built, model, groups):
        ranks = 1
        if place.entry.tp_dim is not None:
            ranks = groups.etp_size if place.entry.is_expert else groups.tp_size
        sizes[place.megatron_name] = parameter.numel() * ranks
        if place.entry in (EMBEDDING, HEAD):
            sizes[place.megatron_name] = model.vocab_size * model.hidden_size
    everywhere: list[Any] = [None] * dist.get_world_size()
    with lost_ranks_reported():
        dist.all_gather_object(everywhere, sizes)
    return sum(dict(item for of_rank in everywhere for item in of_rank.items()).values())


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
        raise ConfigError(
            "no tokenizer: import the teacher first (convert import), or set data.tokenizer to a Hugging Face folder "
            "or a GGUF file"
        )
    return resolve_source(recipe.teacher.model.hf)
