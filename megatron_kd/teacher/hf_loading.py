"""Loading a transformers model for a teacher, and proving what was loaded: every weight, hashed and as described."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.device import current_device, fail_together, first_rank_tells, is_cuda
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.checkpoint_files import one_line
from megatron_kd.models.hf_config import HF_KEYS, check_architecture
from megatron_kd.models.hf_source import SafetensorsFolder, resolve_source, weights_sha256

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_FUNCTION = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}
"""Keys of config.json that do not change what the weights compute."""


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model and where it came from.

    Attributes:
        path: the folder or GGUF file.
        model: the ``PreTrainedModel`` with its head.
        weights_sha256: ``models.hf_source.weights_sha256``, as ``convert import`` notes it.
        config_sha256: of all keys of config.json that matter; of a GGUF file, whose metadata they are, its bytes.
    """

    path: Path
    model: Any
    weights_sha256: str
    config_sha256: str


def load_model(source: str | None, precision: str, device_map: str | None) -> LoadedModel:
    """Loads a model on this rank's device, or over a node's GPUs. Nothing is downloaded. Collective over all ranks.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: the source does not exist.
        CheckpointError: it is damaged, is no causal language model, or leaves weights of the model unfilled.
    """
    with fail_together(f"loading {source}"):
        path = resolve_source(source or "")
        is_gguf = path.is_file()
        if is_gguf and path.suffix != ".gguf":
            raise ConfigError(f"teacher.model.hf names {str(path)!r}: neither a folder of safetensors nor a .gguf file")
        # GGUF weights are hashed as what they dequantise to, like those of an import.
        model = _from_pretrained(path, torch.float32 if is_gguf else _DTYPES[precision], device_map)
        model.requires_grad_(False)
        model.eval()
    hashes = first_rank_tells(f"hashing {path}", lambda: _hashes(path, model))
    if is_gguf:
        with fail_together(f"rounding {path}"):
            for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
                parameter.data = parameter.data.to(_DTYPES[precision])
    return LoadedModel(path, model, *hashes)


def _hashes(path: Path, model: Any) -> tuple[str, str]:
    """Of the weights and of the configuration. By one rank for all: a hundred billion weights take many minutes."""
    if path.is_file():
        return weights_sha256(_ModelWeights(path, model)), _sha256_of_file(path)
    weights = SafetensorsFolder(path)
    return weights_sha256(weights), config_sha256(weights.config())


def described_architecture(model: ModelConfig, loaded: LoadedModel) -> dict[str, Any]:
    """The fields of a recipe's model that the loaded one was found to have; kept in the cache.

    All of them where it is the recipe's model in every respect; else those that every architecture has, which must
    agree.

    Raises:
        CheckpointError: the first field that differs, with both values.
    """
    config = loaded.model.config.get_text_config()
    if config.model_type == model.family:
        # A teacher that only transformers runs may be what no family here builds, with biases for instance.
        with suppress(CheckpointError):
            check_architecture(model, config.to_dict())
            return {key: value for key, value in model.model_dump(mode="json").items() if key != "hf"}
    seen = {ours: getattr(config, theirs, None) for ours, theirs in HF_KEYS.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    seen["rotary_base"] = rope.get("rope_theta") if isinstance(rope, dict) else None
    tied = getattr(config, "tie_word_embeddings", None)
    seen["untie_embeddings_and_output_weights"] = None if tied is None else not tied
    described: dict[str, Any] = {"name": model.name}
    for field, value in seen.items():
        if not isinstance(value, int | float):
            continue  # a family without such a thing, or with one for each layer
        ours = getattr(model, field)
        if not math.isclose(ours, value, rel_tol=1e-6):
            raise CheckpointError(
                f"{loaded.path} has {field} {value}, teacher.model {model.name!r} says {ours}: correct the recipe"
            )
        described[field] = ours
    return described


def _from_pretrained(path: Path, dtype: torch.dtype, device_map: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
    if is_cuda():
        options["device_map"] = device_map or {"": current_device()}
    else:
        options["attn_implementation"] = "eager"
    if path.is_file():
        source, options["gguf_file"] = path.parent, path.name
    else:
        # Checks what transformers reports less clearly, and that nothing has to be unpickled.
        source, options["use_safetensors"] = SafetensorsFolder(path).path, True
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # a reader of bytes: a damaged file can make anything of it
        raise CheckpointError(f"{path} cannot be loaded by transformers: {one_line(error)}") from error
    for what, names in (
        ("lacks", report["missing_keys"]),
        ("has no place in the model for", report["unexpected_keys"]),
        ("has another shape than the model for", report["mismatched_keys"]),
    ):
        if names:
            first = sorted(map(str, names))[0]
            raise CheckpointError(
                f"{path} {what} {first!r} ({len(names)} such tensors): it is not the {model.config.model_type!r} "
                "model that its configuration says"
            )
    return model


class _ModelWeights:
    """The tensors of a model in memory, as ``weights_sha256`` reads them."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path = path
        self._config: dict[str, Any] = model.config.to_dict()
        self._state: dict[str, Tensor] = model.state_dict()

    def names(self) -> list[str]:
        return sorted(self._state)

    def read(self, name: str, index: int | None = None) -> Tensor:
        tensor: Tensor = self._state[name].cpu()
        return tensor if index is None else tensor[index]

    def config(self) -> dict[str, Any]:
        return self._config


def config_sha256(config: dict[str, Any]) -> str:
    """The sha256 (hexadecimal) of a transformers configuration, without keys that do not change what is computed."""
    kept = {key: value for key, value in config.items() if key not in _NO_FUNCTION}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
