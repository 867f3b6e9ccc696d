"""Weights become a folder that ``transformers`` loads: safetensors, config.json and the tokenizer."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.data.tokenizer import Tokenizer
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.files import fsync_directory, write_json
from megatron_kd.models.hf_config import hf_config
from megatron_kd.models.hf_files import CONFIG, GENERATION_CONFIG, read_json
from megatron_kd.models.hf_source import HFWeights
from megatron_kd.models.load import check_names
from megatron_kd.models.parameters import places
from megatron_kd.models.safetensors_writer import ShardedWriter
from megatron_kd.progress import progress

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What an export takes from the configuration that the weights came with: an architecture does not say it."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote: ``bytes`` of weights, in ``files``, most of them of ``dtype``."""

    output: Path
    checkpoint: Path
    parameters: int
    bytes: int
    files: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**self.__dict__, "output": str(self.output), "checkpoint": str(self.checkpoint)}


def export_weights(
    weights: HFWeights,
    model: ModelConfig,
    output: Path,
    *,
    tokenizer: Tokenizer,
    kept_from: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    show_progress: bool = True,
) -> ExportReport:
    """Writes a Hugging Face folder in one process, one tensor (of experts one expert) in memory at a time.

    The folder appears under its name when it is complete.

    Args:
        kept_from: a folder with the config.json, and perhaps the generation_config.json, that the weights came with:
            special tokens are taken from there, without it the end of a text from the tokenizer.
        max_shard_bytes: of the tensors in one file, unless one alone is larger.
        dtype: of all tensors; None: as they are stored.

    Raises:
        CheckpointError: the output exists, the tokenizer has more tokens than the embedding, a tensor is missing, one
            too many or damaged.
        OSError: as the system reports it; nothing is left under the name.
    """
    if output.exists():
        raise CheckpointError(f"{output} exists already: remove it, or choose another --output")
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding of {weights.path} {model.vocab_size}: "
            "give the tokenizer of these weights"
        )
    check_names(model, weights)
    with _published(output) as folder:
        writer = _write_tensors(weights, model, folder, max_shard_bytes, dtype, show_progress)
        most = max(writer.bytes_of, key=lambda kind: writer.bytes_of[kind])
        name = str(most).removeprefix("torch.")
        write_json(folder / CONFIG, _configuration(model, tokenizer, kept_from, name))
        if kept_from is not None and (kept_from / GENERATION_CONFIG).exists():
            shutil.copyfile(kept_from / GENERATION_CONFIG, folder / GENERATION_CONFIG)
        _write_tokenizer(tokenizer, folder)
    return ExportReport(output, weights.path, writer.parameters, writer.total_bytes, len(writer.files()), name)


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``200MB``, ``2GiB`` or a plain number. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size is {text!r}, must be a size such as 5GB or 500MB")
    return size


def parse_dtype(text: str | None) -> torch.dtype | None:
    """The dtype of ``bf16``, ``fp16`` or ``fp32``. Raises ConfigError for anything else."""
    if text is None:
        return None
    if text not in DTYPES:
        raise ConfigError(f"--dtype is {text!r}, must be one of {', '.join(DTYPES)}")
    return DTYPES[text]


@contextmanager
def _published(output: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends well, and is removed otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}.tmp")
    partial.mkdir()
    try:
        yield partial
        fsync_directory(partial)
        partial.rename(output)
        fsync_directory(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(
    weights: HFWeights, model: ModelConfig, folder: Path, limit: int, dtype: torch.dtype | None, show: bool
) -> ShardedWriter:
    # In the model's order, so that neighbours in a layer are read one after the other.
    experts: dict[str, int | None] = {}
    for place in places(model):
        for name in place.hf_names:
            experts[name] = model.num_moe_experts if place.entry.stacked else None

    def pieces(name: str, count: int | None) -> Iterator[Tensor]:
        for index in (None,) if count is None else range(count):
            yield _in_dtype(name, weights.read(name, index), dtype)

    with (
        ShardedWriter(folder, list(experts), limit) as writer,
        progress("exporting weights", len(experts), unit="tensors", enabled=show) as advance,
    ):
        for name, count in experts.items():
            writer.add(name, pieces(name, count), count)
            advance(1)
    return writer


def _in_dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Raises CheckpointError where a number is too large for the dtype (float16 ends at 65,504)."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(
            f"{name} holds {float(tensor.abs().max()):.4g}, too large for --dtype {str(dtype).removeprefix('torch.')}: "
            "take bf16"
        )
    return converted


def _configuration(model: ModelConfig, tokenizer: Tokenizer, kept_from: Path | None, dtype: str) -> dict[str, Any]:
    kept: Mapping[str, Any] = {"eos_token_id": tokenizer.eos_id}
    if kept_from is not None:
        source = read_json(kept_from / CONFIG)
        kept = {key: source[key] for key in KEPT if source.get(key) is not None}
    return {**hf_config(model), **kept, "dtype": dtype, "torch_dtype": dtype}


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    beside = folder / ".tokenizer"
    tokenizer.save(beside)
    for file in beside.iterdir():
        file.rename(folder / file.name)
    beside.rmdir()
