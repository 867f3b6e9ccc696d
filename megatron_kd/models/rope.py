"""Rotary frequencies with Llama-3 scaling, and YaRN's values where Megatron-Core looks for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
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


def restart_at_documents(built: GPTModel) -> None:
    """Turns by the positions that a forward pass is called with, where it is called with documents as well.

    Megatron-Core turns by the place in the row, whatever ``position_ids`` say. Scores depend on differences of places
    alone, so the function is the same; but far down a row, angles are rounded otherwise than for the document alone.
    """
    asked: dict[str, Any] = {}

    def note(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        positions, documents = arguments[1:3]
        asked["positions"] = None if documents is None else positions
        asked["length"] = None if documents is None else documents.shape[1]

    def pick(rotary: Any, _: tuple[Any, ...], found: Any) -> Any:
        positions = asked.get("positions")
        if positions is None:
            return found
        # Of the whole row, since a context-parallel rank's own places are not those that it needs.
        whole = rotary.forward(asked["length"], packed_seq=True)
        angles, *factor = whole if isinstance(whole, tuple) else (whole,)  # YaRN's concentration comes with it
        angles = angles[:, 0, 0][positions.t()][:, :, None]
        return (angles, *factor) if factor else angles

    built.register_forward_pre_hook(note)
    built.rotary_pos_emb.register_forward_hook(pick)
