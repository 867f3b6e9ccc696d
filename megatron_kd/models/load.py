"""Hugging Face weights into a Megatron-Core model, one tensor at a time, each rank its shard."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.hf_names import Entry, entries, merged, name_of, shard
from megatron_kd.models.hf_source import HFWeights
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.progress import progress

# What the recipe's architecture says, under the names of a Hugging Face configuration.
_HF_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}


def check_architecture(model: ModelConfig, hf: dict[str, Any]) -> None:
    """Compares the recipe's architecture with a Hugging Face configuration.

    Raises:
        CheckpointError: the first field that differs, with both values. An almost right model trains for a week.
    """
    kind = hf.get("model_type", model.family)
    if kind != model.family:
        raise CheckpointError(
            f"the weights are of the architecture {kind!r}, the model {model.name!r} is of the family "
            f"{model.family!r}, the only one this version builds: use other weights"
        )
    biased = [key for key in ("attention_bias", "mlp_bias") if hf.get(key)]
    if biased:
        raise CheckpointError(f"the weights have biases ({biased[0]}), which this version does not build")
    seen: dict[str, Any] = {ours: hf[theirs] for ours, theirs in _HF_KEYS.items() if hf.get(theirs) is not None}
    rope = hf.get("rope_parameters") or {}
    theta = rope.get("rope_theta", hf.get("rope_theta"))
    if theta is not None:
        seen["rotary_base"] = float(theta)
    if "tie_word_embeddings" in hf:
        seen["untie_embeddings_and_output_weights"] = not hf["tie_word_embeddings"]
    for field, value in seen.items():
        ours = getattr(model, field)
        if ours != value and not (isinstance(value, float) and abs(ours - value) <= 1e-6 * abs(value)):
            raise CheckpointError(
                f"the weights have {field} {value}, the model {model.name!r} says {ours}: correct the model's file"
            )
    scaling = rope.get("rope_type", (hf.get("rope_scaling") or {}).get("rope_type", "default"))
    if scaling != "default":
        raise CheckpointError(f"the weights use rotary scaling {scaling!r}, which this version does not build")


def load_hf_weights(
    built: GPTModel, model: ModelConfig, weights: HFWeights, tp_rank: int = 0, tp_size: int = 1, *, show: bool = False
) -> None:
    """Fills this rank's shard of a model. No collective; every rank reads what it needs.

    Raises:
        CheckpointError: another architecture, a missing tensor or a shape that does not fit.
    """
    check_architecture(model, weights.config())
    parameters = dict(built.named_parameters())
    padded = padded_vocab_size(model.vocab_size, tp_size)
    todo = entries(model)
    with progress("importing weights", len(todo), unit="tensors", enabled=show) as advance, torch.no_grad():
        for entry, layer in todo:
            parameter = parameters.pop(_parameter_name(entry, layer, parameters))
            local = shard(entry, merged(entry, layer, weights.read, model, padded), tp_rank, tp_size)
            if local.shape != parameter.shape:
                raise CheckpointError(
                    f"{name_of(entry.megatron, layer)}: the weights have shape {tuple(local.shape)}, "
                    f"the model {model.name!r} needs {tuple(parameter.shape)}"
                )
            parameter.copy_(local)
            advance(1)
    if parameters:
        raise CheckpointError(f"no weights for {sorted(parameters)[0]!r} ({len(parameters)} parameters left unfilled)")


def _parameter_name(entry: Entry, layer: int | None, parameters: dict[str, torch.nn.Parameter]) -> str:
    name = name_of(entry.megatron, layer)
    if name not in parameters and entry.te is not None:
        name = name_of(entry.te, layer)
    if name not in parameters:
        raise CheckpointError(f"the model has no parameter {name!r}; its layer specification is not the table's")
    return name
