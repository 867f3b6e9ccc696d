"""The parameters that one rank holds, tensor by tensor, as Megatron-Core builds them.

H hidden size, q and kv the widths of all query and key-value heads, E experts. Fixed against counted models in
``tests/distributed/test_planning_memory.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_kd.config import ModelConfig
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.planning.layout import Layout

# Megatron-Core's DDP lets each parameter of a buffer begin at a multiple of 64 numbers, and with the distributed
# optimizer a buffer has a multiple of lcm(shards, 128), so that all shards are equal.
_PARAMETER_MULTIPLE = 64
_BUFFER_MULTIPLE = 128


@dataclass(frozen=True)
class Parameters:
    """Numbers on one rank.

    Attributes:
        dense, experts: parameters.
        dense_buffer, experts_buffer: with the padding of DDP's buffers.
        largest: of one parameter, or of what one operator makes the gradients of at once.
    """

    dense: int
    experts: int
    dense_buffer: int
    experts_buffer: int
    largest: int

    @property
    def total(self) -> int:
        """All of them, without padding."""
        return self.dense + self.experts

    @property
    def buffer(self) -> int:
        """All of them, with padding."""
        return self.dense_buffer + self.experts_buffer


def rank_parameters(model: ModelConfig, layout: Layout, stage: int) -> Parameters:
    """What each rank of a pipeline stage holds."""
    return _rank_parameters(
        _architecture(model),
        layout.tp,
        layout.pp,
        layout.vp,
        layout.ep if model.num_moe_experts is not None else 1,
        stage,
        layout.dense_shards,
        layout.expert_shards(model.num_moe_experts is not None),
    )


def whole_model(model: ModelConfig) -> int:
    """All parameters, a tied embedding once, the vocabulary without padding."""
    shape = _architecture(model)
    layer = sum(_layer_dense(shape, 1)) + sum(_layer_experts(shape, 1))
    embeddings = (2 if shape.untied else 1) * shape.vocab_size * shape.hidden_size
    return model.num_layers * layer + embeddings + shape.hidden_size


@dataclass(frozen=True)
class _Architecture:
    """What decides the shapes; hashable, so that a search does the same sum once."""

    layers: int
    hidden_size: int
    ffn: int
    q: int
    kv: int
    heads: int
    head_size: int
    vocab_size: int
    experts: int
    untied: bool
    biases: bool
    sinks: bool
    qk_norm: bool


def _architecture(model: ModelConfig) -> _Architecture:
    return _Architecture(
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn=model.ffn_hidden_size,
        q=model.num_attention_heads * model.kv_channels,
        kv=model.num_query_groups * model.kv_channels,
        heads=model.num_attention_heads,
        head_size=model.kv_channels,
        vocab_size=model.vocab_size,
        experts=model.num_moe_experts or 0,
        untied=model.untie_embeddings_and_output_weights,
        biases=model.family == "gpt_oss",
        sinks=model.family == "gpt_oss",
        qk_norm=model.family == "qwen3",
    )


@lru_cache(maxsize=4096)
def _rank_parameters(
    shape: _Architecture, tp: int, pp: int, vp: int, ep: int, stage: int, dense_shards: int, expert_shards: int
) -> Parameters:
    layers = shape.layers // pp
    hidden = shape.hidden_size
    vocabulary = padded_vocab_size(shape.vocab_size, tp) // tp * hidden
    # Of each chunk what lies before its layers and behind them.
    outside: list[list[int]] = [[] for _ in range(vp)]
    if stage == 0:
        outside[0].append(vocabulary)
    if stage == pp - 1:
        outside[-1].append(hidden)  # the final norm
        if shape.untied or pp > 1:  # a tied head on another stage is a second copy
            outside[-1].append(vocabulary)
    ends = [size for of_chunk in outside for size in of_chunk]
    dense = list(_layer_dense(shape, tp))
    experts = list(_layer_experts(shape, ep))
    return Parameters(
        dense=layers * sum(dense) + sum(ends),
        experts=layers * sum(experts),
        # Each chunk has buffers of its own.
        dense_buffer=sum(
            _buffer(layers // vp * sum(map(_padded, dense)) + sum(map(_padded, of_chunk)), dense_shards)
            for of_chunk in outside
        ),
        experts_buffer=vp * _buffer(layers // vp * sum(map(_padded, experts)), expert_shards),
        largest=max([*dense, *ends[:1], sum(experts) * 2 // 3]),
    )


def _layer_dense(shape: _Architecture, tp: int) -> Iterator[int]:
    """Sizes of one layer's tensors outside its experts."""
    hidden = shape.hidden_size
    yield hidden  # norm before attention
    yield hidden  # norm before the feed-forward part
    yield hidden * (shape.q + 2 * shape.kv) // tp
    yield hidden * shape.q // tp
    if shape.biases:
        yield (shape.q + 2 * shape.kv) // tp
        yield hidden
    if shape.sinks:
        yield shape.heads // tp
    if shape.qk_norm:
        yield shape.head_size
        yield shape.head_size
    if shape.experts:
        yield hidden * shape.experts  # router
        yield shape.experts
    else:
        yield hidden * 2 * shape.ffn // tp
        yield hidden * shape.ffn // tp


def _layer_experts(shape: _Architecture, ep: int) -> Iterator[int]:
    """Sizes of the tensors of one layer's experts on one rank."""
    for _ in range(shape.experts // ep):
        yield shape.hidden_size * 2 * shape.ffn
        yield 2 * shape.ffn
        yield shape.hidden_size * shape.ffn
        yield shape.hidden_size


def _padded(size: int) -> int:
    return -(-size // _PARAMETER_MULTIPLE) * _PARAMETER_MULTIPLE


def _buffer(size: int, shards: int) -> int:
    multiple = math.lcm(shards, _BUFFER_MULTIPLE)
    return -(-size // multiple) * multiple
