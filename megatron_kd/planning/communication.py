"""Seconds that ranks spend on exchanges, from the bytes one rank sends and the bandwidth its group has.

T positions of a micro batch on this rank, H hidden, b bytes of a number. A ring of n ranks sends (n − 1)/n of a tensor
for a gather or a scatter of it, twice that for a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import ModelConfig
from megatron_kd.config.gpus import GPU
from megatron_kd.planning import efficiency
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.parameters import Parameters


@dataclass(frozen=True)
class LayerCommunication:
    """Seconds of one layer and micro batch, forward; backward is given by its factors.

    Attributes:
        tensor: gathers and scatters around attention, and around a dense feed-forward part.
        expert: rows to their experts and back.
        context: keys and values, or heads, between the parts of a sequence.
    """

    tensor: float
    expert: float
    context: float

    @property
    def forward(self) -> float:
        """All three."""
        return self.tensor + self.expert + self.context

    @property
    def backward(self) -> float:
        """The input of a product is gathered once more for dW; rows and heads go the same ways back."""
        return 1.5 * self.tensor + self.expert + 2 * self.context


def layer_communication(model: ModelConfig, layout: Layout, gpu: GPU) -> LayerCommunication:
    """One layer."""
    size, tp, ep, cp = layout.itemsize, layout.tp, layout.ep, layout.cp
    whole = layout.tokens * model.hidden_size * size
    regions = 2 if model.num_moe_experts is None else 1
    tensor = regions * 2 * whole * _ring(tp) / (efficiency.LINK * _bandwidth(layout, gpu, tp))
    expert = 0.0
    if model.num_moe_experts is not None:
        rows = layout.slice_tokens * (model.moe_router_topk or 1) * model.hidden_size * size
        rate = efficiency.ALL_TO_ALL * _all_to_all_bandwidth(layout, gpu, ep)
        expert = 2 * rows * _ring(ep) * (efficiency.MOE_TIME_IMBALANCE if ep > 1 else 1.0) / rate
    context = 0.0
    if cp > 1:
        q = model.num_attention_heads * model.kv_channels
        kv = model.num_query_groups * model.kv_channels
        rate = efficiency.ALL_TO_ALL * _bandwidth(layout, gpu, tp * cp)
        local = layout.tokens / tp * size
        if model.family == "gpt_oss":  # heads for positions and back
            context = local * (2 * q + 2 * kv) * _ring(cp) / rate
        else:  # keys and values travel round; most of it beside the attention of the part that is there
            context = 0.3 * local * 2 * kv * (cp - 1) / rate
    return LayerCommunication(efficiency.TENSOR_PARALLEL_EXPOSED * tensor, expert, context)


def stage_exchange(model: ModelConfig, layout: Layout, gpu: GPU) -> float:
    """One micro batch's hidden states to the next stage, and their gradient back, as often as a stage has chunks."""
    if layout.pp == 1:
        return 0.0
    rate = gpu.network_bandwidth if layout.pipeline_spans_nodes else gpu.link_bandwidth
    return layout.vp * 2 * layout.slice_tokens * model.hidden_size * layout.itemsize / (efficiency.LINK * rate)


def answer_exchange(size: float, layout: Layout, gpu: GPU) -> float:
    """So many bytes to a rank from ranks anywhere, once a step."""
    return size / (efficiency.ALL_TO_ALL * _all_to_all_bandwidth(layout, gpu, layout.world))


def gradient_reduction(held: Parameters, layout: Layout, gpu: GPU) -> float:
    """Once a step, nothing beside it: float32 gradients scattered, weights gathered, over data-parallel ranks."""
    seconds = 0.0
    for buffer, shards in (
        (held.dense_buffer, layout.dense_shards),
        (held.experts_buffer, layout.expert_shards(held.experts > 0)),
    ):
        # Its ranks lie apart by the size of a copy of the model: the group covers all ranks of the stage.
        rate = efficiency.LINK * _bandwidth(layout, gpu, layout.world // layout.pp)
        seconds += buffer * (4 + layout.itemsize) * _ring(shards) / rate
    return seconds


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _bandwidth(layout: Layout, gpu: GPU, ranks: int) -> float:
    """Of a group that covers so many consecutive ranks: the slower part of its ring."""
    return min(gpu.network_bandwidth, gpu.link_bandwidth) if layout.spans_nodes(ranks) else gpu.link_bandwidth


def _all_to_all_bandwidth(layout: Layout, gpu: GPU, ranks: int) -> float:
    """Of a group in which all send to all: only what leaves the node goes over the network."""
    if not layout.spans_nodes(ranks):
        return gpu.link_bandwidth
    outside = (ranks - layout.gpus_per_node) / ranks
    return gpu.network_bandwidth / outside
