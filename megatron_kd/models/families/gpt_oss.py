"""GPT-OSS: attention sinks, sliding windows in every other layer, YaRN, biases, experts with a clamped SwiGLU.

The values are those of the released models (facts in ``docs/models.md``): the activation is
min(g, 7)·σ(1.702·min(g, 7))·(clamp(u, −7, 7) + 1), the router takes the top k of its biased logits and the softmax
over those alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.models.families.family import HF_LAYER, INPUT_NORM, LAYER, Entry, Family, attention
from megatron_kd.models.families.layouts import SAME, InterleavedGateAndUp, Layout, Transposed

GATE_GAIN = 1.702
CLAMP = 7.0


def _expert(linear: str, kind: str, hf: str, layout: Layout, tp_dim: int | None) -> Entry:
    experts = LAYER + "mlp.experts."
    return Entry(
        f"{experts}local_experts.{{e}}.{linear}.{kind}",
        (f"{HF_LAYER}mlp.experts.{hf}",),
        layout,
        tp_dim,
        te=f"{experts}{linear}.{kind}{{e}}",  # the grouped matrices of all experts are one module there
    )


def quick_gelu(x: Tensor) -> Tensor:
    """x·σ(1.702·x), any shape. Megatron-Core's own is compiled at its first use, which needs a C++ compiler."""
    return x * torch.sigmoid(GATE_GAIN * x)


def _transformer(model: ModelConfig) -> dict[str, Any]:
    windows = model.layer_windows()
    fields: dict[str, Any] = {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": CLAMP,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "num_moe_experts": model.num_moe_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
    if model.window_size is not None:
        # Megatron-Core's window counts the positions before the own one.
        fields["window_size"] = (model.window_size - 1, 0)
        fields["window_attn_skip_freq"] = [int(window is not None) for window in windows]
    return fields


def _layer_types(model: ModelConfig) -> dict[str, Any]:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in model.layer_windows()]
    return {"layer_types": kinds, "swiglu_limit": CLAMP}


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    layer=(
        INPUT_NORM,
        *attention(bias=True),
        Entry(LAYER + "self_attention.core_attention.softmax_offset", (HF_LAYER + "self_attn.sinks",), tp_dim=0),
        Entry(LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",)),
        Entry(LAYER + "mlp.router.weight", (HF_LAYER + "mlp.router.weight",)),
        Entry(LAYER + "mlp.router.bias", (HF_LAYER + "mlp.router.bias",)),
        _expert("linear_fc1", "weight", "gate_up_proj", InterleavedGateAndUp(), 1),
        _expert("linear_fc1", "bias", "gate_up_proj_bias", InterleavedGateAndUp(), 1),
        _expert("linear_fc2", "weight", "down_proj", Transposed(), 1),
        _expert("linear_fc2", "bias", "down_proj_bias", SAME, None),
    ),
    transformer=_transformer,
    hf_keys={
        "num_moe_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "window_size": "sliding_window",
    },
    hf_constants={
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": CLAMP,
        "swiglu_alpha": GATE_GAIN,
        "layer_types": lambda model: _layer_types(model)["layer_types"],
    },
    hf_extra=_layer_types,
)
