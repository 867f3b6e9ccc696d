"""What a family of architectures says about itself: its table of weights, its configuration, its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_kd.config import ModelConfig
from megatron_kd.models.families.layouts import SAME, GateAndUp, Layout, QueryKeyValue, Vocabulary


@dataclass(frozen=True)
class Entry:
    """One kind of Megatron parameter and the Hugging Face tensors it is made of.

    ``{i}`` in a name stands for the layer, ``{e}`` for the expert. Where the Megatron name has an expert and the
    Hugging Face names have none, those hold all experts in their first dimension.

    Attributes:
        megatron: its name in ``GPTModel`` built from the local specification.
        hf: the tensors it is made of.
        layout: how they become the whole Megatron tensor, and back.
        tp_dim: the dimension of the merged tensor that is split over tensor-parallel ranks (an expert's: over
            expert-tensor-parallel ranks); None if replicated.
        te: its name in the Transformer Engine specification, where norms are fused into the next linear layer.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = SAME
    tp_dim: int | None = None
    te: str | None = None

    @property
    def is_expert(self) -> bool:
        """Whether there is one for each expert."""
        return "{e}" in self.megatron

    @property
    def is_of_layer(self) -> bool:
        """Whether there is one for each layer."""
        return "{i}" in self.megatron

    @property
    def stacked(self) -> bool:
        """Whether the Hugging Face tensors hold all experts."""
        return self.is_expert and "{e}" not in self.hf[0]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: of the recipe's ``family``; Hugging Face's ``model_type`` is the same word.
        architecture: Hugging Face's class, for the ``architectures`` of an exported configuration.
        layer: entries of every layer.
        transformer: fields of Megatron-Core's ``TransformerConfig`` beyond those of every decoder here.
        hf_keys: fields of a recipe's architecture beyond the common ones, under the names of a Hugging Face
            configuration.
        hf_constants: what a Hugging Face configuration must say (or leave out), because it is built so.
        qk_layernorm: queries and keys are normalised by themselves.
        hf_extra: what else an exported configuration says.
    """

    name: str
    architecture: str
    layer: tuple[Entry, ...]
    transformer: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    hf_constants: Mapping[str, Any] = field(default_factory=dict)
    qk_layernorm: bool = False
    hf_extra: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}


LAYER, HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."
EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary(), 0)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
HEAD = Entry("output_layer.weight", ("lm_head.weight",), Vocabulary(), 0)
"""Every family has these three; HEAD only where the embedding is not the head as well."""

INPUT_NORM = Entry(
    LAYER + "input_layernorm.weight",
    (HF_LAYER + "input_layernorm.weight",),
    te=LAYER + "self_attention.linear_qkv.layer_norm_weight",
)


def attention(bias: bool) -> tuple[Entry, ...]:
    """Projections of grouped-query attention, with their biases or without."""
    listed = []
    for kind in ("weight", "bias") if bias else ("weight",):
        projections = tuple(f"{HF_LAYER}self_attn.{p}_proj.{kind}" for p in "qkv")
        listed += [
            Entry(f"{LAYER}self_attention.linear_qkv.{kind}", projections, QueryKeyValue(), 0),
            Entry(
                f"{LAYER}self_attention.linear_proj.{kind}",
                (f"{HF_LAYER}self_attn.o_proj.{kind}",),
                # The bias is added once, after the sum over the ranks.
                tp_dim=1 if kind == "weight" else None,
            ),
        ]
    return tuple(listed)


DENSE_MLP = (
    Entry(
        LAYER + "pre_mlp_layernorm.weight",
        (HF_LAYER + "post_attention_layernorm.weight",),
        te=LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    Entry(
        LAYER + "mlp.linear_fc1.weight",
        (HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"),
        GateAndUp(),
        1,
    ),
    Entry(LAYER + "mlp.linear_fc2.weight", (HF_LAYER + "mlp.down_proj.weight",), tp_dim=1),
)
