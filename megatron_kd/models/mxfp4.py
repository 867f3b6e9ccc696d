"""MXFP4 experts, as GPT-OSS is released, shown under the plain names and dequantised one expert at a time.

The format is the OCP Microscaling Formats specification 1.0's MXFP4: 32 E2M1 values share one E8M0 scale. In a file
``X`` is ``X_blocks``, uint8 [E, out, in / 32, 16] with two values a byte, the earlier one in the low four bits, and
``X_scales``, uint8 [E, out, in / 32], the exponent of two plus 127. The plain tensor of Hugging Face is [E, in, out].
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_kd.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_kd.models.hf_source import StoredWeights

QUANT_METHOD = "mxfp4"
BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_NO_NUMBER = 255  # the scale that stands for NaN


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """One matrix. Exact: every product of an E2M1 value and a scale is a bfloat16 number, or beyond its range.

    Args:
        blocks: uint8 [out, in / 32, 16].
        scales: uint8 [out, in / 32].

    Returns:
        bfloat16 [in, out], a transposed view.

    Raises:
        ValueError: shapes or dtypes that do not belong together, or a scale that is no number.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks and scales are {blocks.dtype} and {scales.dtype}, must be torch.uint8")
    if blocks.dim() != 3 or blocks.shape[2] * 2 != BLOCK or blocks.shape[:2] != scales.shape:
        raise ValueError(
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not [out, in / 32, 16] and [out, in / 32]"
        )
    if (scales == _NO_NUMBER).any():
        raise ValueError(f"a scale is {_NO_NUMBER}, which stands for no number")
    rows, groups = scales.shape
    pairs = torch.index_select(_pairs(), 0, blocks.reshape(-1).int()).view(torch.bfloat16)
    factors = torch.index_select(_factors(), 0, scales.reshape(-1).int())
    return (pairs.view(-1, BLOCK) * factors.unsqueeze(1)).view(rows, groups * BLOCK).t()


@cache
def _pairs() -> Tensor:
    """Int32 [256]: for every byte its two values in bfloat16, those of the low four bits first."""
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    # As one number, which is looked up faster than two.
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.int32).squeeze(1)


@cache
def _factors() -> Tensor:
    """Bfloat16 [256]: the power of two of every scale, the smallest a subnormal number."""
    return torch.tensor([2.0 ** (scale - _BIAS) for scale in range(_NO_NUMBER)] + [math.nan], dtype=torch.bfloat16)


class MXFP4Weights:
    """A source of weights with MXFP4 tensors in it, seen as if they had been stored in bfloat16."""

    def __init__(self, stored: StoredWeights) -> None:
        """Args: stored: the tensors as they lie in the files.

        Raises CheckpointError where blocks have no scales, or the other way round.
        """
        self.path: Path = stored.path
        self.stored = stored
        there = set(stored.names())
        self._quantized = {name.removesuffix(BLOCKS) for name in there if name.endswith(BLOCKS)}
        with_scales = {name.removesuffix(SCALES) for name in there if name.endswith(SCALES)}
        for name in sorted(self._quantized ^ with_scales):
            missing = name + (SCALES if name in self._quantized else BLOCKS)
            raise CheckpointError(
                f"{self.path} has no tensor {missing!r}, the other half of an MXFP4 one: fetch it again"
            )

    def names(self) -> list[str]:
        plain = (
            name
            for name in self.stored.names()
            if name.removesuffix(BLOCKS).removesuffix(SCALES) not in self._quantized
        )
        return sorted({*plain, *self._quantized})

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._quantized else self.stored.dtype(name)

    def read(self, name: str, index: int | None = None) -> Tensor:
        if name not in self._quantized:
            return self.stored.read(name, index)
        if index is None:
            experts = self.stored.read(name + SCALES).shape[0]
            return torch.stack([self.read(name, expert) for expert in range(experts)])
        try:
            return dequantize(self.stored.read(name + BLOCKS, index), self.stored.read(name + SCALES, index))
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: {name}, expert {index}, is not MXFP4 ({error}): fetch it again"
            ) from error

    def config(self) -> dict[str, Any]:
        """Hugging Face's, without its ``quantization_config``: what is read here is not quantised."""
        return {key: value for key, value in self.stored.config().items() if key != "quantization_config"}
