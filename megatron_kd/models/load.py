"""Hugging Face weights into a Megatron-Core model, one tensor at a time, each rank its shard."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError, KDError
from megatron_kd.models.hf_names import HEAD, Entry, entries, merged, name_of, shard
from megatron_kd.models.hf_source import HFWeights
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.progress import progress

# What the recipe's architecture says, under the names of a Hugging Face configuration.
HF_KEYS = {
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
    if hf.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"the weights use the activation {hf['hidden_act']!r}, which this version does not build")
    hf = _with_defaults(hf)
    seen: dict[str, Any] = {ours: hf[theirs] for ours, theirs in HF_KEYS.items() if theirs in hf}
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    seen["rotary_base"] = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    seen["untie_embeddings_and_output_weights"] = not hf["tie_word_embeddings"]
    for field, value in seen.items():
        ours = getattr(model, field)
        if ours != value and not (isinstance(value, float) and abs(ours - value) <= 1e-6 * abs(value)):
            raise CheckpointError(
                f"the weights have {field} {value}, the model {model.name!r} says {ours}: correct the model's file"
            )
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise CheckpointError(f"the weights use rotary scaling {scaling!r}, which this version does not build")


def _with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """What transformers' LlamaConfig takes where a config.json is silent, as older ones are."""
    heads = hf.get("num_attention_heads")
    defaults: dict[str, Any] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "num_key_value_heads": heads}
    if heads and hf.get("hidden_size"):
        defaults["head_dim"] = hf["hidden_size"] // heads
    return {key: value for key, value in {**defaults, **_given(hf)}.items() if value is not None}


def _given(hf: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if value is not None}


def load_hf_weights(
    built: GPTModel, model: ModelConfig, weights: HFWeights, tp_rank: int = 0, tp_size: int = 1, *, show: bool = False
) -> None:
    """Fills this rank's shard of a model. No collective; every rank reads what it needs.

    Raises:
        CheckpointError: another architecture, a missing tensor, one too many, or a shape that does not fit.
    """
    check_architecture(model, weights.config())
    _check_nothing_is_left(model, weights)
    parameters = dict(built.named_parameters())
    padded = padded_vocab_size(model.vocab_size, tp_size)
    todo = entries(model)
    with progress("importing weights", len(todo), unit="tensors", enabled=show) as advance, torch.no_grad():
        for entry, layer in todo:
            parameter = parameters.pop(_parameter_name(entry, layer, parameters))
            try:
                local = shard(entry, merged(entry, layer, weights.read, model, padded), tp_rank, tp_size)
            except KDError:
                raise
            except (RuntimeError, ValueError) as error:
                sources = ", ".join(name_of(name, layer) for name in entry.hf)
                raise CheckpointError(
                    f"{weights.path}: {sources} do not fit the model {model.name!r}: {error}"
                ) from error
            if local.shape != parameter.shape:
                raise CheckpointError(
                    f"{name_of(entry.megatron, layer)}: the weights have shape {tuple(local.shape)}, "
                    f"the model {model.name!r} needs {tuple(parameter.shape)}"
                )
            parameter.copy_(local)
            advance(1)
    if parameters:
        raise CheckpointError(f"no weights for {sorted(parameters)[0]!r} ({len(parameters)} parameters left unfilled)")


def _check_nothing_is_left(model: ModelConfig, weights: HFWeights) -> None:
    """A tensor that no entry reads, a bias or a norm, belongs to a function that the built model does not compute."""
    used = {name_of(name, layer) for entry, layer in entries(model) for name in entry.hf}
    used |= set(HEAD.hf)  # some files repeat the embedding as the head of a tied model
    left = [name for name in weights.names() if name not in used and not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise CheckpointError(
            f"{weights.path} has {left[0]!r}, which the model {model.name!r} has no place for "
            f"({len(left)} such tensors): it is of another architecture"
        )


def _parameter_name(entry: Entry, layer: int | None, parameters: dict[str, torch.nn.Parameter]) -> str:
    name = name_of(entry.megatron, layer)
    if name not in parameters and entry.te is not None:
        name = name_of(entry.te, layer)
    if name not in parameters:
        raise CheckpointError(f"the model has no parameter {name!r}; its layer specification is not the table's")
    return name
