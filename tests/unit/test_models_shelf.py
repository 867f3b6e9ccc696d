"""The models of ``configs/models``: published configurations, published counts, published FLOPs."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_kd.config import ModelConfig, load_model
from megatron_kd.errors import CheckpointError
from megatron_kd.models.build import build_on_meta
from megatron_kd.models.counts import count_parameters, padding_parameters
from megatron_kd.models.flops import training_flops_per_token
from megatron_kd.models.hf_config import check_architecture, hf_config
from tests.assets import ROOT

# Total and active parameters. GPT-OSS and Llama: the model cards, exact to the unit; SmolLM2: its files.
COUNTS = {
    "gpt_oss_20b": (20_914_757_184, 4_187_440_704),
    "gpt_oss_120b": (116_829_156_672, 5_711_982_912),
    "llama31_8b": (8_030_261_248, 8_030_261_248),
    "llama32_3b": (3_212_749_824, 3_212_749_824),
    "qwen3_8b": (8_190_735_360, 8_190_735_360),
    "smollm2_135m": (134_515_008, 134_515_008),
}
# What the released config.json files say, as far as it decides what is computed.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
RELEASED = {
    "gpt_oss_20b": GPT_OSS_20B,
    "gpt_oss_120b": {
        **GPT_OSS_20B,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "llama31_8b": LLAMA_31_8B,
    "llama32_3b": {
        **LLAMA_31_8B,
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "rope_scaling": {**LLAMA_31_8B["rope_scaling"], "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen3_8b": QWEN3_8B,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_published_ones(name: str, groups: Any) -> None:
    model = load_model(name, ROOT)
    counted = count_parameters(model, groups)
    assert (counted.total, counted.active) == COUNTS[name]
    # Layer by layer is the whole model, which no memory is taken for.
    built = build_on_meta(model, groups)
    assert all(parameter.is_meta for parameter in built.parameters())
    assert sum(p.numel() for p in built.parameters()) - padding_parameters(model) == counted.total


@pytest.mark.parametrize("name", RELEASED)
def test_the_shelf_is_what_was_released(name: str) -> None:
    model = load_model(name, ROOT)
    check_architecture(model, RELEASED[name])
    # What an export writes says the same, read by transformers' own class.
    from transformers import AutoConfig

    written = {key: value for key, value in hf_config(model).items() if key not in ("rope_theta", "rope_scaling")}
    read = AutoConfig.for_model(**written)
    for key, value in RELEASED[name].items():
        if key == "rope_scaling":
            assert all(read.rope_parameters[k] == v for k, v in (value or {}).items())
        elif key == "rope_theta":
            assert read.rope_parameters["rope_theta"] == value
        else:
            assert getattr(read, key) == value, key


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt_oss_20b", {"sliding_window": 127}, "window_size 127"),
        ("gpt_oss_20b", {"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types"),
        ("gpt_oss_20b", {"num_experts_per_tok": 2}, "moe_router_topk 2"),
        ("gpt_oss_20b", {"swiglu_limit": 6.0}, "swiglu_limit 6.0"),
        ("gpt_oss_20b", {"rope_scaling": {**YARN, "truncate": True}}, "truncate True"),
        ("gpt_oss_20b", {"rope_scaling": {**YARN, "factor": 16.0}}, "factor 16.0"),
        # What a config.json does not say is what transformers takes for it, and what it says twice is its choice.
        ("gpt_oss_20b", {"rope_scaling": without(YARN, "truncate")}, "truncate True"),
        ("gpt_oss_20b", {"rope_scaling": without(YARN, "original_max_position_embeddings")}, "original_max|no sense"),
        (
            "llama31_8b",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN},
            "rotary_base|'yarn'",
        ),
        ("llama31_8b", {"rope_scaling": None}, "scaling 'none'"),
        ("llama31_8b", {"rope_scaling": "x"}, "makes no sense"),
        ("llama31_8b", {"num_attention_heads": "four"}, "makes no sense|num_attention_heads"),
        ("gpt_oss_20b", {"model_type": "llama"}, "architecture 'llama'"),
        ("llama31_8b", {"rope_scaling": {**LLAMA_31_8B["rope_scaling"], "factor": 32.0}}, "factor 32.0"),
        ("llama31_8b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "scaling 'linear'"),
        ("llama31_8b", {"attention_bias": True}, "attention_bias True"),
        ("llama31_8b", {"model_type": "mistral"}, "'mistral'"),
        ("qwen3_8b", {"use_sliding_window": True}, "use_sliding_window True"),
    ],
)
def test_an_almost_right_configuration_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_architecture(load_model(name, ROOT), {**RELEASED[name], **changes})


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("sliding_window", {"window_size": 64}),
        ("num_experts_per_tok", {"moe_router_topk": 2}),
        ("layer_types", {"window_attn_skip_freq": 4}),
        ("rms_norm_eps", {"layernorm_epsilon": 1e-6}),
        ("swiglu_limit", {}),
    ],
)
def test_silence_is_what_transformers_takes_for_it(key: str, changes: dict[str, Any]) -> None:
    silent, model = without(GPT_OSS_20B, key), load_model("gpt_oss_20b", ROOT)
    check_architecture(model, silent)
    if changes:
        with pytest.raises(CheckpointError, match=next(iter(changes)) if key != "layer_types" else key):
            check_architecture(model.model_copy(update=changes), silent)


def test_flops_are_those_of_the_public_cards() -> None:
    # Per token at 32,768 positions, forward and backward.
    for name, expected in (("gpt_oss_20b", 3.137e10), ("gpt_oss_120b", 4.532e10)):
        assert training_flops_per_token(load_model(name, ROOT), 32768) == pytest.approx(expected, rel=1e-3)


def test_a_cut_keeps_each_layers_window() -> None:
    model = load_model("gpt_oss_20b", ROOT)
    cut = model.cut([0, 2, 5, 7, 9])
    assert cut.layer_windows() == [128, 128, None, None, None]
    again = ModelConfig.model_validate(cut.model_dump(mode="json"))
    assert again.layer_windows() == cut.layer_windows() and again.num_layers == 5
