"""What a layer keeps between forward and backward, and what exists for a moment within it. Bytes.

T positions of a micro batch on this rank, s of them between the tensor-parallel regions (T/TP with sequence
parallelism, else T), H hidden, q and kv widths of all query and key-value heads, F feed-forward, R rows sent to this
rank's experts, E experts. The layers are those of ``models/spec.py`` with Transformer Engine: norms fused into the
linear layers, flash attention, rotary positions and activations not fused.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import ModelConfig
from megatron_kd.planning.efficiency import MOE_KEPT_IMBALANCE, MOE_WORST_LAYER
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.recomputation import Recomputation


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer for one micro batch.

    Attributes:
        input: of what comes in, which recomputation keeps.
        kept: from forward to backward, the input included.
        forward: at once in a forward pass that keeps nothing (a teacher's).
        backward: beside what is kept, while the layer goes backward: gradients of activations, exchange buffers.
    """

    input: float
    kept: float
    forward: float
    backward: float


def layer_activations(model: ModelConfig, layout: Layout, recomputation: Recomputation) -> LayerActivations:
    """One layer; all layers of a model are alike (a window changes the time, not the memory)."""
    size, tokens, kept_slice = layout.itemsize, layout.tokens, layout.slice_tokens * layout.itemsize
    hidden, tp = model.hidden_size, layout.tp
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    norm = kept_slice * hidden * (0 if recomputation.recomputes("layernorm") else 1)
    stream = kept_slice * hidden
    # Under sequence parallelism a norm's output is gathered for the product, and gathered again in backward.
    gathered = tokens * hidden * size

    # Kept: the projection's output (v is a view of it), q and k with positions, the output; log-sum-exps in float32.
    attention = tokens / tp * ((3 * q + 3 * kv) * size + 4 * model.num_attention_heads)
    # Sines and cosines, made anew for q and for k of every layer; one row's are those of all.
    attention += layout.row_tokens / layout.cp * 4 * model.kv_channels * size
    if recomputation.recomputes("core_attn"):
        attention -= tokens / tp * 4 * model.num_attention_heads
    attention_moment = gathered + tokens / tp * (2 * q + 3 * kv) * size

    if model.num_moe_experts is None:
        # Kept: gate and up (2), the gated gate, up + 0 (the offset of other families), their product.
        width = tokens / tp * model.ffn_hidden_size * size
        feed_forward = norm + 5 * width
        if recomputation.recomputes("mlp"):
            feed_forward = 0.0
        moment, backward = gathered + 5 * width, gathered + 5 * width
        again = norm + 5 * width if recomputation.recomputes("mlp") else 0.0
    else:
        rows = layout.slice_tokens * (model.moe_router_topk or 1) * size
        spread = layout.ep > 1
        mean_rows = rows * (MOE_KEPT_IMBALANCE if spread else 1.0)
        worst_rows = rows * (MOE_WORST_LAYER if spread else 1.0)
        ffn = model.ffn_hidden_size
        # Router: logits, probabilities in float32, the map of who goes where.
        router = layout.slice_tokens * model.num_moe_experts * 13
        # Kept: rows as they arrive, and of width F: gate and up (2), the clamped gate, its sigmoid, the gated gate,
        # the clamped up + 1, their product, that times the router's probability.
        acts = 2 if recomputation.recomputes("moe_act") else 8
        experts = mean_rows * (hidden + acts * ffn)
        again = mean_rows * (8 - acts) * ffn
        feed_forward = norm + router + experts
        if recomputation.recomputes("moe"):
            feed_forward, again = norm, router + mean_rows * (hidden + 8 * ffn)
        # Sent, received and sorted copies; the product with the probabilities passes through float32.
        moment = worst_rows * (3 * hidden + 6 * ffn)
        backward = worst_rows * (3 * hidden + 7 * ffn)
    kept = stream + norm + attention + stream + feed_forward
    return LayerActivations(
        input=stream,
        kept=kept,
        forward=2 * stream + max(attention_moment, moment),
        backward=stream + max(attention_moment, backward) + again,
    )


@dataclass(frozen=True)
class StageActivations:
    """Bytes on a rank of one pipeline stage.

    Attributes:
        kept: by all micro batches in flight, in whichever chunk, at the end of the youngest one's forward pass.
        backward: beside it, while its last layer goes backward; recomputed layers included.
        forward: at once where nothing is kept.
    """

    kept: float
    backward: float
    forward: float


def stage_activations(model: ModelConfig, layout: Layout, recomputation: Recomputation, stage: int) -> StageActivations:
    """All layers of a stage, with what lies before the first and behind the last of them."""
    layer = layer_activations(model, layout, recomputation)
    layers = model.num_layers // (layout.pp * layout.vp)  # of a chunk
    kept = recomputation.kept_layers(layers) * layer.kept + recomputation.kept_inputs(layers) * layer.input
    # Behind the last layer: the final norm's input and output, or what is sent on to the next stage.
    kept += (1 + (stage == layout.pp - 1) / layout.vp) * layer.input
    # Tokens, positions, labels, weights; the angles of the rotary positions.
    kept += layout.tokens * 28
    rotary = layout.row_tokens * model.kv_channels * 4
    recomputed = recomputation.at_once(layers) * layer.kept
    return StageActivations(
        kept=layout.in_flight(stage) * kept + rotary,
        backward=layer.backward + recomputed,
        forward=layer.forward + rotary,
    )
