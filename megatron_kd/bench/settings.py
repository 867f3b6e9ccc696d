"""What to measure and where: sizes, dtype and device from the options of ``bench loss``, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kd.device.platform import CPU_NAME
from megatron_kd.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICES = ("auto", CPU_NAME, "cuda")
# A GPU wants some thousand rows a chunk (each chunk reads and writes dW once), a CPU some hundred.
CPU_CHUNK_MIB, GPU_CHUNK_MIB = 64.0, 1536.0


@dataclass(frozen=True)
class Setting:
    """Token numbers N (each a measurement of its own), hidden size D, vocabulary V, cached tokens K, input dtype."""

    tokens: tuple[int, ...]
    hidden: int
    vocab: int
    top_k: int
    dtype: str

    def input_bytes(self, tokens: int) -> int:
        """Bytes of hidden states, head and cached targets (4 + 2 an entry, 4 a tail) for one token number."""
        dense = (tokens + self.vocab) * self.hidden * DTYPES[self.dtype].itemsize
        return dense + tokens * (6 * self.top_k + 4)


SMALL = Setting((4096,), 512, 32768, 100, "fp32")
"""For a CPU: some minutes, 4 GiB."""
PUBLISHED = Setting(tuple(1024 * n for n in (8, 16, 32, 64, 128, 256)), 4096, 128256, 100, "bf16")
"""The toy of the published figures: the output projection of Llama 3.1 8B alone."""


def choose_setting(
    *,
    tokens: Sequence[int] | None,
    hidden: int | None,
    vocab: int | None,
    top_k: int | None,
    dtype: str | None,
    published: bool,
    on_gpu: bool,
) -> Setting:
    """The given values over a preset: ``PUBLISHED`` where it is asked for or nothing is given on a GPU, else ``SMALL``.

    Raises:
        ConfigError: sizes that cannot be, an unknown dtype.
    """
    nothing_given = all(value is None for value in (tokens, hidden, vocab, top_k, dtype))
    preset = PUBLISHED if published or (on_gpu and nothing_given) else SMALL
    setting = Setting(
        preset.tokens if tokens is None else tuple(tokens),
        preset.hidden if hidden is None else hidden,
        preset.vocab if vocab is None else vocab,
        preset.top_k if top_k is None else top_k,
        preset.dtype if dtype is None else dtype,
    )
    if setting.dtype not in DTYPES:
        raise ConfigError(f"dtype is {setting.dtype!r}, must be one of {', '.join(DTYPES)}")
    if not setting.tokens:
        raise ConfigError("no token number to measure was given")
    for number in setting.tokens:
        check_positive("tokens", number)
    for name in ("hidden", "vocab", "top_k"):
        check_positive(name.replace("_", "-"), getattr(setting, name))
    if setting.top_k > setting.vocab:
        raise ConfigError(f"top-k is {setting.top_k}, must be at most vocab, {setting.vocab}")
    return setting


def check_positive(name: str, value: float | None) -> None:
    """Raises ConfigError unless the option was left out or is above 0."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} is {value}, must be positive")


def check_budget(chunk_mib: float | None) -> None:
    """Raises ConfigError unless --chunk-mib was left out or is a number of bytes above 0."""
    check_positive("chunk-mib", chunk_mib)
    if chunk_mib is not None and not 1 <= chunk_mib * 2**20 < math.inf:
        raise ConfigError(f"chunk-mib is {chunk_mib}, must be a finite number of MiB and at least a byte")


def parse_tokens(tokens: int | None, sweep: str | None) -> list[int] | None:
    """The token numbers of ``--tokens`` or of ``--sweep-tokens`` (``1024,2048``), ascending; None if neither is given.

    Raises:
        ConfigError: both are given, or the list is not one of whole numbers.
    """
    if sweep is None:
        return None if tokens is None else [tokens]
    if tokens is not None:
        raise ConfigError("give either --tokens or --sweep-tokens")
    try:
        return sorted({int(number) for number in sweep.split(",")})
    except ValueError as error:
        raise ConfigError(f"--sweep-tokens is {sweep!r}, must be whole numbers with commas: 1024,2048,4096") from error


def choose_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where there is a device.

    Raises:
        ConfigError: no such device here.
    """
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}, must be one of {', '.join(DEVICES)}")
    if device == CPU_NAME:
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == "cuda":
        return found.type
    if device == "auto":
        return CPU_NAME
    raise ConfigError("device is 'cuda', but this process sees no CUDA device; run it on a GPU node or take cpu")
