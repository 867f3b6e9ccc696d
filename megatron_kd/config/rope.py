"""Scaled rotary positions, one section per published kind; keys are those of Hugging Face's ``rope_scaling``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_kd.config.base import Section

Factor = Annotated[float, Field(ge=1)]
Position = Annotated[int, Field(ge=1)]


class Llama3RopeScaling(Section):
    """Llama 3.1 and later: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    rope_type: Literal["llama3"]
    factor: Factor
    """How much longer the context is than the one trained at first."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths above original / low_freq_factor are divided by factor."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths below original / high_freq_factor are kept."""
    original_max_position_embeddings: Position = 8192
    """Context of the first training."""


class YarnRopeScaling(Section):
    """YaRN (GPT-OSS): a ramp over the dimensions between beta_slow and beta_fast turns, and cos and sin scaled by
    0.1·ln(factor) + 1."""

    rope_type: Literal["yarn"]
    factor: Factor
    """How much longer the context is than the one trained at first."""
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """Dimensions that turn more often than this over the original context are kept."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """Dimensions that turn less often than this are divided by factor."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions; false for GPT-OSS."""
    original_max_position_embeddings: Position = 4096
    """Context of the first training."""


RopeScaling = Annotated[Llama3RopeScaling | YarnRopeScaling, Field(discriminator="rope_type")]
