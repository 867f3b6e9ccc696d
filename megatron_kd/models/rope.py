"""Rotary frequencies with Llama-3 scaling, and YaRN's values where Megatron-Core looks for them."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.config.rope import Llama3RopeScaling, YarnRopeScaling


def position_embedding_type(model: ModelConfig) -> str:
    """``yarn`` or ``rope``, in Megatron-Core's words."""
    return "yarn" if isinstance(model.rope_scaling, YarnRopeScaling) else "rope"


def set_yarn(config: TransformerConfig, model: ModelConfig) -> None:
    """Puts YaRN's values on a configuration, which has no fields for them: ``GPTModel`` reads them as attributes.

    With ``mscale`` None the concentration factor is 0.1·ln(factor) + 1, as in the paper (arXiv:2309.00071).
    """
    scaling = model.rope_scaling
    if not isinstance(scaling, YarnRopeScaling):
        return
    values = {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }
    for name, value in values.items():
        setattr(config, name, value)


def llama3_frequencies(model: ModelConfig, scaling: Llama3RopeScaling) -> Tensor:
    """The frequencies of each pair of channels, float32 [d / 2] on the CPU, in radians a position.

    Wavelengths λ above original / low are divided by the factor, those below original / high kept; between, the two
    are mixed by (original / λ − low) / (high − low). Source: the rope of Llama 3.1.

    Megatron-Core has this with low 1, high 4 and original 8192 fixed.
    """
    d = model.kv_channels
    plain = 1.0 / model.rotary_base ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor
