"""Layer specifications: Transformer Engine on CUDA where it is installed, Megatron-Core's local modules elsewhere."""

from __future__ import annotations

import torch
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_kd.device import is_cuda
from megatron_kd.models.attention import LocalAttention
from megatron_kd.models.te_attention import document_attention


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension that takes part in sequence parallelism.

    Megatron-Core's wrapper of the torch norm refuses sequence parallelism, where the weight's gradient must be summed
    over the tensor-parallel group because every rank sees other tokens. Megatron does that for parameters marked so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def use_transformer_engine() -> bool:
    """Asks Megatron-Core itself: where the import failed it leaves mock objects behind, so attributes prove nothing."""
    return is_cuda() and bool(te_extension.HAVE_TE)


def layer_spec(
    config: TransformerConfig, pp_rank: int = 0, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The specification of the decoder's layers, those of this pipeline stage or chunk, for the device at hand."""
    experts, normed = config.num_moe_experts, config.qk_layernorm
    if use_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=normed
        )
        layer.submodules.self_attention.submodules.core_attention = document_attention(
            te_extension.TEDotProductAttention
        )
        return layer
    layer = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=normed)
    parts = layer.submodules
    parts.input_layernorm = TorchRMSNorm
    parts.pre_mlp_layernorm = TorchRMSNorm
    parts.self_attention.submodules.core_attention = LocalAttention
    if normed:
        parts.self_attention.submodules.q_layernorm = TorchRMSNorm
        parts.self_attention.submodules.k_layernorm = TorchRMSNorm
    # The local specification renames its norms to the fused Transformer Engine keys when it saves, so that both
    # backends write the same checkpoint; but before experts Transformer Engine has a norm by itself.
    if experts is not None:
        renamed = {k: v for k, v in parts.sharded_state_dict_keys_map.items() if k != "pre_mlp_layernorm."}
        parts.sharded_state_dict_keys_map = renamed
    layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=TorchRMSNorm)
