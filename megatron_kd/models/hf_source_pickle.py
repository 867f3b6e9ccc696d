"""Weights in files of ``torch.save``, read only where asked for: with ``weights_only`` and mapped, not copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint_files import one_line
from megatron_kd.models.hf_files import CONFIG, read_index, read_json, refuse_pointer
from megatron_kd.models.hf_memory import TensorsInMemory

SUFFIXES = (".bin", ".pt", ".pth")
INDEX = "pytorch_model.bin.index.json"


def pickle_files(path: Path) -> list[Path]:
    """The pickled weights at a path: the file itself, or those of a folder, if there are any."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if (path / INDEX).exists():
        return [path / name for name in sorted(set(read_index(path / INDEX).values()))]
    whole = path / "pytorch_model.bin"
    if whole.exists():
        return [whole]
    # What a trainer leaves beside the weights (training_args.bin, optimizer.pt) is not taken for them.
    return sorted(file for file in path.glob("model*") if file.suffix in SUFFIXES)


class PickledWeights(TensorsInMemory):
    """State dictionaries in one or several files, with config.json beside them. Tensors stay in the mapped files."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        """Raises CheckpointError where a file is damaged, holds more than tensors, or one name is in two files."""
        super().__init__(path, {})
        self._folder = path.parent if path.is_file() else path
        for file in files:
            for name, tensor in _load(file).items():
                if not isinstance(name, str) or not isinstance(tensor, Tensor):
                    raise CheckpointError(
                        f"{file} holds {name!r}, a {type(tensor).__name__}: not a state dict of names and tensors; "
                        "save the model's alone"
                    )
                if name in self._state:
                    raise CheckpointError(f"{file} holds {name!r}, which another file of {path} holds too")
                self._state[name] = tensor

    def config(self) -> dict[str, Any]:
        return read_json(self._folder / CONFIG)


def _load(file: Path) -> dict[Any, Any]:
    try:
        refuse_pointer(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle of anything: there is no end to what it may raise
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors ({one_line(error)}): fetch it again, or use safetensors"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds a {type(state).__name__}, not a state dict: save the model's alone")
    return state
