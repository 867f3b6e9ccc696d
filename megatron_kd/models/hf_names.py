"""The table from Hugging Face names and shapes to Megatron-Core's, one list of entries per family.

An entry names the Hugging Face tensors that make one Megatron tensor, how they are merged, and how the result splits
over tensor-parallel ranks. ``{i}`` stands for the layer. H hidden, F FFN width, V vocabulary, d head size,
G query groups (key-value heads), R query heads per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig

Merge = Callable[[list[Tensor], ModelConfig], Tensor]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter.

    Attributes:
        megatron: its name in ``GPTModel`` built from the local specification.
        hf: the tensors it is made of.
        merge: makes the whole Megatron tensor, possibly with extra leading dimensions, from the Hugging Face ones.
        tp_dim: the dimension of the merged tensor that is split over tensor-parallel ranks; None if replicated.
        te: its name in the Transformer Engine specification, where norms are fused into the next linear layer.
    """

    megatron: str
    hf: tuple[str, ...]
    merge: Merge
    tp_dim: int | None
    te: str | None = None


class Reader(Protocol):
    """Reads one tensor by its Hugging Face name."""

    def __call__(self, name: str) -> Tensor: ...


def _same(tensors: list[Tensor], model: ModelConfig) -> Tensor:
    return tensors[0]


def _query_key_value(tensors: list[Tensor], model: ModelConfig) -> Tensor:
    """q [G·R·d, H], k [G·d, H], v [G·d, H] → [G·(R+2)·d, H]: per group its queries, then its key, then its value."""
    groups, d = model.num_query_groups, model.kv_channels
    q, k, v = (t.reshape(groups, -1, t.shape[-1]) for t in tensors)
    if q.shape[1] * groups != model.num_attention_heads * d:
        raise ValueError(f"{q.shape[1] * groups} query rows for {model.num_attention_heads} heads of {d} channels")
    return torch.cat((q, k, v), dim=1).reshape(-1, tensors[0].shape[-1])


def _gate_and_up(tensors: list[Tensor], model: ModelConfig) -> Tensor:
    """gate [F, H], up [F, H] → [2, F, H]; a rank holds its slice of both, gate rows first."""
    return torch.stack(tensors)


LLAMA_LAYER = (
    Entry(
        "decoder.layers.{i}.input_layernorm.weight",
        ("model.layers.{i}.input_layernorm.weight",),
        _same,
        None,
        te="decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(
        "decoder.layers.{i}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkv"),
        _query_key_value,
        0,
    ),
    Entry(
        "decoder.layers.{i}.self_attention.linear_proj.weight",
        ("model.layers.{i}.self_attn.o_proj.weight",),
        _same,
        1,
    ),
    Entry(
        "decoder.layers.{i}.pre_mlp_layernorm.weight",
        ("model.layers.{i}.post_attention_layernorm.weight",),
        _same,
        None,
        te="decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
    ),
    Entry(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
        _gate_and_up,
        1,
    ),
    Entry("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.mlp.down_proj.weight",), _same, 1),
)
EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _same, 0)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), _same, None)
HEAD = Entry("output_layer.weight", ("lm_head.weight",), _same, 0)

LAYERS = {"llama": LLAMA_LAYER}


def entries(model: ModelConfig) -> list[tuple[Entry, int | None]]:
    """All entries of a model with their layer index (None outside the layers), in Megatron's order."""
    listed: list[tuple[Entry, int | None]] = [(EMBEDDING, None)]
    for i in range(model.num_layers):
        listed += [(entry, i) for entry in LAYERS[model.family]]
    listed.append((FINAL_NORM, None))
    if model.untie_embeddings_and_output_weights:
        listed.append((HEAD, None))
    return listed


def name_of(template: str, layer: int | None) -> str:
    """The template with its layer filled in."""
    return template if layer is None else template.format(i=layer)


def merged(entry: Entry, layer: int | None, read: Reader, model: ModelConfig, padded_vocab: int) -> Tensor:
    """The whole Megatron tensor of an entry; vocabulary-sharded ones are padded with zero rows to ``padded_vocab``.

    Raises:
        ValueError, RuntimeError: where the tensors do not have the shapes of the model.
    """
    tensor = entry.merge([read(name_of(name, layer)) for name in entry.hf], model)
    if entry in (EMBEDDING, HEAD):
        # Fewer or more rows would vanish in the padding unseen.
        if tensor.shape[0] != model.vocab_size:
            raise ValueError(f"{tensor.shape[0]} rows for a vocabulary of {model.vocab_size}")
        tensor = torch.cat((tensor, tensor.new_zeros(padded_vocab - tensor.shape[0], tensor.shape[1])))
    return tensor


def shard(entry: Entry, tensor: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's part of a merged tensor, in the parameter's own shape [out/tp, in] or [out, in/tp]."""
    if entry.tp_dim is not None:
        tensor = tensor.chunk(tp_size, dim=entry.tp_dim)[tp_rank]
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() == 3 else tensor
