"""Weights as Megatron-Core distributed checkpoints, with a note of what model they are.

A checkpoint directory holds the ``torch_dist`` files, which load in any parallel layout, and ``model.json``:
architecture, origin and identity of the weights, and the hashes of the files. It appears under its final name only
when complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module
from xxhash import xxh3_128_hexdigest

from megatron_kd.config import ModelConfig
from megatron_kd.device import fail_together
from megatron_kd.errors import CheckpointError, DamagedCheckpointError
from megatron_kd.files import fsync_directory, write_json
from megatron_kd.models.checkpoint_files import check_content, check_files, one_line
from megatron_kd.models.chunks import chunks_of
from megatron_kd.models.sharded_write import write_sharded

MODEL_NOTE, NOTE_HASH = "model.json", "xxh3_128"
EXTRA_STATE = "_extra_state"


def publish_directory(partial: Path, final: Path) -> None:
    """Gives a finished directory its final name, on the first rank; all ranks wait. Collective."""
    dist.barrier()
    with fail_together(f"publishing {final}"):
        if dist.get_rank() == 0:
            partial.rename(final)
            fsync_directory(final.parent)


def make_partial_directory(final: Path) -> Path:
    """An empty directory beside the final one for the ranks to write into. Collective."""
    partial = final.with_name(f".{final.name}.partial")
    with fail_together(f"creating {partial}"):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    return partial


def check_checkpoint(path: Path) -> None:
    """Looks for damage in every file of a checkpoint, each rank at its share. Collective over all ranks.

    Checkpoints of earlier versions, which keep no hashes, are looked at from the outside only.

    Raises:
        DamagedCheckpointError: on the ranks that found it, naming the file.
        RemoteRankError: on the others.
    """
    with fail_together(f"reading {path}"):
        files = read_note(path).get("files", {})
        check_files(path, files)
        check_content(path, files, dist.get_rank(), dist.get_world_size())


def read_sharded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Megatron-Core's load of what a sharded state dict asks for. Collective.

    Raises:
        DamagedCheckpointError: on every rank, where a file is missing or damaged for one (RemoteRankError there).
    """
    check_checkpoint(path)
    # Ranks read their own parts, so that damage may show on one alone.
    with fail_together(f"loading {path}"):
        try:
            loaded: dict[str, Any] = dist_checkpointing.load(state, str(path))
        # torch's own error is a BaseException, and below it lies whatever a damaged file makes of pickle.
        except (Exception, CheckpointException) as error:
            raise DamagedCheckpointError(f"{path} is damaged or of another model: {one_line(error)}") from error
    return loaded


def sharded_weights(built: Module) -> dict[str, Any]:
    """The sharded state dict without the layers' extra state, which holds scaling factors of FP8 and no weights.

    Its names are those of ``state_dict`` on this rank, in chunks by their numbers; the tensors go by their place in the
    whole model, so that the checkpoint is the same.
    """
    chunks = chunks_of(built)
    return {
        f"{index}.{name}" if len(chunks) > 1 else name: value
        for index, chunk in enumerate(chunks)
        for name, value in chunk.sharded_state_dict(prefix="").items()
        if not name.endswith(EXTRA_STATE)
    }


def save_weights(
    built: Module,
    model: ModelConfig,
    path: Path,
    note: dict[str, Any],
    before_publishing: Callable[[Path], None] = lambda folder: None,
    *,
    use_up: bool = False,
) -> None:
    """Saves weights alone, with ``model.json``. Collective; the directory appears when all is written.

    Args:
        note: kept in ``model.json`` beside the architecture: source, weights_sha256, tokenizer.
        before_publishing: adds files of its own to the directory, on the first rank.
        use_up: the model is not needed afterwards: a part of it is not kept twice while it is written.

    Raises:
        CheckpointError: the directory exists.
    """
    with fail_together(f"saving {path}"):
        if path.exists():
            raise CheckpointError(f"{path} exists already; remove it or choose another name")
    partial = make_partial_directory(path)
    state = sharded_weights(built)
    if use_up:
        _take_halves_apart(state)
    files = write_sharded({"model": state}, partial, path)
    with fail_together(f"saving {path}"):
        if dist.get_rank() == 0:
            before_publishing(partial)
            write_note(partial, model, files, note)
    publish_directory(partial, path)


def _take_halves_apart(state: dict[str, Any]) -> None:
    """Gives the gate's and the up projection's rows memory of their own, matrix by matrix, and frees the parameters'.

    Megatron-Core saves them as two tensors, views of one parameter, and copies all such views of the model before it
    writes the first: most of the model a second time.
    """

    def own(part: ShardedTensor) -> ShardedTensor:
        return replace(part, data=part.data.clone())

    def taken(value: Any) -> Any:
        if not isinstance(value, ShardedTensorFactory):
            return value
        halves = dict_list_map_inplace(own, value.build())
        value.data.untyped_storage().resize_(0)
        return halves

    dict_list_map_inplace(taken, state)


def write_note(folder: Path, model: ModelConfig, files: dict[str, Any], note: dict[str, Any]) -> None:
    """Writes ``model.json``: the architecture, the hashes of the files, what else is given, and a hash of all that."""
    content = {"architecture": model.model_dump(mode="json"), **note, "files": files}
    write_json(folder / MODEL_NOTE, {**content, NOTE_HASH: _note_hash(content)})


def _note_hash(content: dict[str, Any]) -> str:
    """xxh3_128 (hexadecimal) of a note without its own hash, as JSON with sorted keys and no spaces."""
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_note(path: Path) -> dict[str, Any]:
    """``model.json`` of a checkpoint.

    Raises:
        CheckpointError: there is no such directory.
        DamagedCheckpointError: it is no checkpoint of ours, or not a whole one.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint at {path}: import one with megatron-kd convert import, or correct the path"
        )
    try:
        note: dict[str, Any] = json.loads((path / MODEL_NOTE).read_text())
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} has no {MODEL_NOTE}: not a checkpoint of megatron-kd, or an unfinished one"
        ) from None
    except ValueError as error:  # not JSON, or not even text
        raise DamagedCheckpointError(f"{path / MODEL_NOTE} is damaged: {error}") from None
    if not isinstance(note, dict) or not isinstance(note.get("architecture"), dict):
        raise DamagedCheckpointError(f"{path / MODEL_NOTE} is damaged: it does not describe a model")
    # Notes of earlier versions have none.
    noted = note.pop(NOTE_HASH, None)
    if noted is not None and noted != _note_hash(note):
        raise DamagedCheckpointError(f"{path / MODEL_NOTE} is damaged or was changed: it fails its own hash")
    return note


def check_same_architecture(path: Path, note: dict[str, Any], model: ModelConfig) -> None:
    """Raises CheckpointError naming the first field in which a checkpoint is of another model."""
    difference = model.first_difference(note["architecture"])
    if difference is not None:
        field, theirs, ours = difference
        raise CheckpointError(f"{path} holds a model with {field} {theirs}, the recipe's {model.name!r} has {ours}")


def load_weights(built: Module, model: ModelConfig, path: Path) -> None:
    """Loads weights in whatever layout the model was built. Collective.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    with fail_together(f"reading {path}"):
        check_same_architecture(path, read_note(path), model)
    loaded = read_sharded({"model": sharded_weights(built)}, path)
    with fail_together(f"loading {path}"):
        missing, unexpected = built.load_state_dict(loaded["model"], strict=False)
        wrong = [name for name in (*missing, *unexpected) if not name.endswith(EXTRA_STATE)]
        if wrong:
            raise CheckpointError(f"{path} and the model {model.name!r} do not have the same parameters: {wrong[0]}")
