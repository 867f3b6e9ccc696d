"""Floating-point operations of a model, counted from its architecture. A multiply-add is two."""

from __future__ import annotations

from megatron_kd.config import ModelConfig
from megatron_kd.config.gpus import GPUS

# Dense bf16 peaks in FLOP/s. Of other devices no MFU is reported.
PEAK_FLOPS = {name: gpu.peak_flops for name, gpu in GPUS.items()}


def forward_flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """One forward pass of one token: 2·H·(3·ffn·k) + 2·(H·(q + 2·kv) + q·H + 2·q·ctx) a layer, and the head 2·H·V.

    q and kv are heads and groups times the head size; k the experts that a token is sent to, whose router is not
    counted, as is usual; ctx the mean number of positions that a causal query sees, s/2, in a layer with a window of W
    positions W − W(W − 1)/(2s).
    """
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    hidden = model.hidden_size
    mlp = hidden * 3 * model.ffn_hidden_size * (model.moe_router_topk or 1)
    layers = 0.0
    for window in model.layer_windows():
        layers += mlp + hidden * (q + 2 * kv) + q * hidden + 2 * q * mean_context(seq_length, window)
    return 2.0 * (layers + hidden * model.vocab_size)


def mean_context(seq_length: int, window: int | None) -> float:
    """The mean number of positions that a causal query sees."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window * (window - 1) / (2 * seq_length)


def training_flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Forward and backward: three times the forward pass. Recomputation is not counted, as is usual for MFU."""
    return 3.0 * forward_flops_per_token(model, seq_length)
