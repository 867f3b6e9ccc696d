"""Floating-point operations of a model, counted from its architecture. A multiply-add is two.

Counted are matrix products: those of the layers, of attention and of the head. Not counted, as is usual: the router (a
thousandth of a GPT-OSS), norms, activations, softmax, and the embedding, which is a look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_kd.config import ModelConfig
from megatron_kd.config.gpus import GPUS

# Dense bf16 peaks in FLOP/s. Of other devices no MFU is reported.
PEAK_FLOPS = {name: gpu.peak_flops for name, gpu in GPUS.items()}


@dataclass(frozen=True)
class LayerFlops:
    """A forward pass of one token through one layer.

    Attributes:
        projections: of queries, keys, values and the output, 2·(H·(q + 2·kv) + q·H).
        attention: scores and their sum over values, 4·q·ctx.
        feed_forward: 2·H·3·ffn·k, k the experts that a token is sent to, 1 without experts.
    """

    projections: float
    attention: float
    feed_forward: float

    @property
    def total(self) -> float:
        """The whole layer."""
        return self.projections + self.attention + self.feed_forward


def layer_flops(model: ModelConfig, seq_length: int, documents: Sequence[int] | None = None) -> list[LayerFlops]:
    """Every layer, with its window or none.

    q and kv are heads and groups times the head size; ctx the mean number of positions that a causal query sees.

    Args:
        documents: lengths of the documents of packed rows where each sees itself alone; None: whole rows.
    """
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    hidden = model.hidden_size
    projections = 2.0 * (hidden * (q + 2 * kv) + q * hidden)
    feed_forward = 2.0 * hidden * 3 * model.ffn_hidden_size * (model.moe_router_topk or 1)
    lengths = [seq_length] if documents is None else documents
    seen = {w: _mean_over(lengths, w) for w in set(model.layer_windows())}
    return [LayerFlops(projections, 4.0 * q * seen[window], feed_forward) for window in model.layer_windows()]


def head_flops(model: ModelConfig) -> float:
    """One projection of one token by the head: 2·H·V, V without padding."""
    return 2.0 * model.hidden_size * model.vocab_size


def forward_flops_per_token(model: ModelConfig, seq_length: int, documents: Sequence[int] | None = None) -> float:
    """One forward pass of one token: all layers and the head; ``documents`` as in ``layer_flops``."""
    return sum(layer.total for layer in layer_flops(model, seq_length, documents)) + head_flops(model)


def training_flops_per_token(model: ModelConfig, seq_length: int, documents: Sequence[int] | None = None) -> float:
    """Forward and backward: three times the forward pass. Recomputation is not counted, as is usual for MFU."""
    return 3.0 * forward_flops_per_token(model, seq_length, documents)


def mean_context(seq_length: int, window: int | None) -> float:
    """The mean number of positions that a causal query sees: s/2, in a window of W positions W − W(W − 1)/(2s)."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window * (window - 1) / (2 * seq_length)


def _mean_over(lengths: Sequence[int], window: int | None) -> float:
    """The mean over all positions of documents of these lengths."""
    return sum(n * mean_context(n, window) for n in lengths) / sum(lengths)
