"""Floating-point operations of one layer, one head and one micro batch on one rank, by kind. A multiply-add is two.

The kinds run at different shares of the peak (``efficiency.py``). Summed over ranks and layers they are the formula of
``models/flops.py``, but for the imbalance of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import ModelConfig
from megatron_kd.config.gpus import GPU
from megatron_kd.models.flops import mean_context
from megatron_kd.planning import efficiency
from megatron_kd.planning.layout import Layout


@dataclass(frozen=True)
class LayerWork:
    """Forward FLOPs of one layer for one micro batch on one rank."""

    dense: float
    attention: float
    windowed: float
    experts: float

    @property
    def total(self) -> float:
        """All kinds."""
        return self.dense + self.attention + self.windowed + self.experts

    def seconds(self, gpu: GPU, head_size: int, imbalance: float) -> float:
        """At the shares of the peak that are assumed."""
        shares = (
            self.dense / efficiency.DENSE_GEMM
            + self.attention / efficiency.attention_share(head_size)
            + self.windowed / efficiency.WINDOWED_ATTENTION
            + self.experts / efficiency.GROUPED_GEMM * imbalance
        )
        return shares / gpu.peak_flops


def layer_work(model: ModelConfig, layout: Layout, window: int | None) -> LayerWork:
    """One layer, with its window or none."""
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    tokens, hidden = layout.tokens / layout.tp, model.hidden_size
    dense = 2 * tokens * (hidden * (q + 2 * kv) + q * hidden)
    attention = 2 * tokens * 2 * q * mean_context(layout.row_tokens, window)
    feed_forward = 2 * tokens * 3 * hidden * model.ffn_hidden_size
    slides = window is not None and window < layout.row_tokens
    experts = 0.0
    if model.num_moe_experts is not None:
        experts = feed_forward * (model.moe_router_topk or 1)
    return LayerWork(
        dense=dense + (feed_forward if model.num_moe_experts is None else 0.0),
        attention=0.0 if slides else attention,
        windowed=attention if slides else 0.0,
        experts=experts,
    )


def projection_flops(model: ModelConfig, layout: Layout) -> float:
    """One projection of a micro batch by this rank's part of the head."""
    return 2 * layout.tokens * model.hidden_size * -(-model.vocab_size // layout.tp)
