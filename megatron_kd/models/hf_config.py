"""A recipe's architecture beside a Hugging Face configuration: compared when weights come in, written when they go."""

from __future__ import annotations

from typing import Any

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint_files import one_line
from megatron_kd.models.families import FAMILIES, family_of

# Fields of every architecture, under the names of a Hugging Face configuration.
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
# What transformers takes where the scaling of the positions is silent; other keys must be said.
_SCALING_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_NO_SCALING = (None, "default")


def check_architecture(model: ModelConfig, hf: dict[str, Any]) -> None:
    """Compares the recipe's architecture with a Hugging Face configuration.

    Raises:
        CheckpointError: the first field that differs, with both values. An almost right model trains for a week.
    """
    kind = hf.get("model_type", model.family)
    if kind != model.family:
        known = ", ".join(FAMILIES)
        what = "set the model's family" if kind in FAMILIES else f"this version builds {known}: use other weights"
        raise CheckpointError(
            f"the weights are of the architecture {kind!r}, the model {model.name!r} is of the family "
            f"{model.family!r}: {what}"
        )
    family = family_of(model)
    given = _resolved(model.family, hf)
    for key, wanted in family.hf_constants.items():
        value = wanted(model) if callable(wanted) else wanted
        if given.get(key, value) not in (value, None):
            raise CheckpointError(
                f"the weights have {key} {given[key]!r}, the family {model.family!r} is built with {value!r} for "
                f"{model.name!r}: use other weights, or correct the model's file"
            )
    keys = {**HF_KEYS, **family.hf_keys}
    seen: dict[str, Any] = {ours: given[theirs] for ours, theirs in keys.items() if given.get(theirs) is not None}
    seen["rotary_base"] = _rope(given)[0]
    seen["untie_embeddings_and_output_weights"] = not given["tie_word_embeddings"]
    for field, value in seen.items():
        ours = getattr(model, field)
        if not _equal(ours, value):
            raise CheckpointError(
                f"the weights have {field} {value}, the model {model.name!r} says {ours}: correct the model's file"
            )
    _check_scaling(model, _rope(given)[1])


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The configuration of an architecture as ``config.json`` has it; tokens and dtype are not in it."""
    family = family_of(model)
    keys = {**HF_KEYS, **family.hf_keys}
    config = {theirs: getattr(model, ours) for ours, theirs in keys.items()}
    config |= {
        "architectures": [family.architecture],
        "model_type": family.name,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        **{key: value for key, value in family.hf_constants.items() if not callable(value)},
        **family.hf_extra(model),
    }
    # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling.
    scaling = None if model.rope_scaling is None else model.rope_scaling.model_dump(mode="json")
    config["rope_theta"] = model.rotary_base
    config["rope_scaling"] = scaling
    config["rope_parameters"] = {"rope_theta": model.rotary_base, **(scaling or {"rope_type": "default"})}
    return config


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, int | float):
        return abs(ours - theirs) <= 1e-6 * abs(theirs)
    return bool(ours == theirs)


def _rope(hf: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base of the rotary positions, and their scaling (empty without one)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    base = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type"))
    return base, {} if kind in _NO_SCALING else {**rope, "rope_type": kind}


def _check_scaling(model: ModelConfig, theirs: dict[str, Any]) -> None:
    ours = {} if model.rope_scaling is None else model.rope_scaling.model_dump(mode="json")
    kinds = theirs.get("rope_type"), ours.get("rope_type")
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"the weights use rotary scaling {kinds[0] or 'none'!r}, the model {model.name!r} says "
            f"{kinds[1] or 'none'!r}: correct rope_scaling in the model's file"
        )
    theirs = {**_SCALING_DEFAULTS, **{key: value for key, value in theirs.items() if value is not None}}
    for key, value in ours.items():
        if key not in theirs:
            raise CheckpointError(
                f"the weights do not say the rotary scaling's {key}, the model {model.name!r} says {value}: add it to "
                "their config.json"
            )
        if not _equal(value, theirs[key]):
            raise CheckpointError(
                f"the weights have the rotary scaling's {key} {theirs[key]}, the model {model.name!r} says {value}: "
                "correct rope_scaling in the model's file"
            )
    odd = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if theirs.get(key) is not None]
    if odd:
        raise CheckpointError(f"the weights set the rotary scaling's {odd[0]}, which this version does not build")


def _resolved(kind: str, hf: dict[str, Any]) -> dict[str, Any]:
    """A configuration as transformers understands it: its defaults where a config.json is silent, as older ones are,
    its choice where one says a thing twice.

    Raises:
        CheckpointError: transformers refuses it.
    """
    from transformers import AutoConfig

    values = {key: value for key, value in hf.items() if key not in ("model_type", "quantization_config")}
    try:
        resolved: dict[str, Any] = AutoConfig.for_model(kind, **values).to_dict()
    except Exception as error:  # values of any type: there is no end to what a class makes of them
        raise CheckpointError(f"the weights' config.json makes no sense to transformers: {one_line(error)}") from error
    return resolved
