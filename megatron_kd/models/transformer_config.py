"""From a recipe's architecture to Megatron-Core's ``TransformerConfig``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig

from megatron_kd.config import OFFLOAD_KEYS, RECOMPUTE_KEYS, ModelConfig, ParallelismConfig, TrainingConfig
from megatron_kd.config.recompute import WITH_TRANSFORMER_ENGINE
from megatron_kd.device import is_cuda
from megatron_kd.errors import ConfigError
from megatron_kd.models.families import family_of
from megatron_kd.models.families.gpt_oss import GPT_OSS
from megatron_kd.models.rope import set_yarn

Precision = Literal["fp32", "bf16"]


def params_dtype(precision: Precision) -> torch.dtype:
    """The dtype of parameters and activations."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def transformer_config(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    precision: Precision,
    training: TrainingConfig | None = None,
    *,
    interleaved: bool = False,
) -> TransformerConfig:
    """The configuration of a decoder: RMSNorm, SwiGLU, grouped queries and rotary positions, and what its family adds.

    Fusions that need CUDA kernels are on only there. Dropout is 0 everywhere: distillation trains against a fixed
    teacher, and Megatron-Core's random states are not forked on the CPU.

    Args:
        training: says what the backward pass computes again; None: nothing.
        interleaved: in chunks, ``virtual_pipeline_model_parallel_size`` on each stage.

    Raises:
        ConfigError: something of that needs Transformer Engine, which is not there.
    """
    cuda = is_cuda()
    family = family_of(model)
    fields: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.layernorm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "context_parallel_size": parallelism.context_parallel_size,
        "sequence_parallel": parallelism.sequence_parallel,
        "params_dtype": params_dtype(precision),
        "pipeline_dtype": params_dtype(precision),
        "bf16": precision == "bf16",
        "use_cpu_initialization": not cuda,
        "perform_initialization": True,
        # The loss is a sum over tokens; the schedule divides by the unmasked tokens of the global batch.
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,  # its kernels come with apex alone; Transformer Engine has its own
        # In the local path this fusion clamps before the bias is added: another function.
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": cuda and model.num_moe_experts is not None and bool(HAVE_TE),
        "qk_layernorm": family.qk_layernorm,
        # Of two models one may have no experts to share.
        "expert_model_parallel_size": 1 if model.num_moe_experts is None else parallelism.expert_model_parallel_size,
        # Always said: it defaults to the tensor-parallel size.
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size,
        # Sinks are exchanged along heads; without them keys and values travel round the ranks.
        "cp_comm_type": "a2a" if family is GPT_OSS else "p2p",
    }
    if interleaved:
        # One batch of sends and receives cannot hold two of each between the same two ranks, as with two stages.
        fields |= {
            "virtual_pipeline_model_parallel_size": parallelism.virtual_pipeline_model_parallel_size,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if training is not None:
        fields |= {key: getattr(training, key) for key in (*RECOMPUTE_KEYS, *OFFLOAD_KEYS)}
        if training.cpu_offloading and not HAVE_TE:
            raise ConfigError(
                "training.cpu_offloading needs Transformer Engine, which is not installed: install it, or set it to "
                "false"
            )
        for name in training.recompute_modules or ():
            if name in WITH_TRANSFORMER_ENGINE and not HAVE_TE:
                raise ConfigError(
                    f"training.recompute_modules names {name}, for which Megatron-Core needs Transformer Engine, which "
                    "is not installed: install it, or remove the name"
                )
    config = TransformerConfig(**{**fields, **family.transformer(model)})
    set_yarn(config, model)
    return config
