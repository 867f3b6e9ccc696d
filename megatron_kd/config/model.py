"""The architecture of a model, under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import PathString, Section

_NO_FUNCTION = {"name", "hf", "max_position_embeddings"}
"""Fields that do not change what the weights compute."""
Positive = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    """A decoder-only transformer and where its weights come from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Short name, used in reports and in the names of derived students."""
    family: Literal["llama"] = "llama"
    """Architecture: RMSNorm, SwiGLU, rotary positions and no biases for llama."""
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the gated feed-forward layer (of one of its two halves)."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive
    """Key/value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: Positive
    """Width of one head; hidden_size / num_attention_heads where it is not given."""
    vocab_size: Annotated[int, Field(ge=2)]
    """True vocabulary, before any padding for tensor parallelism."""
    max_position_embeddings: Positive
    """Longest sequence the model was trained for."""
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position frequencies (rope theta)."""
    layernorm_epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Epsilon of the RMSNorm layers."""
    untie_embeddings_and_output_weights: bool = True
    """False where the output projection is the embedding matrix."""
    hf: PathString | None = None
    """Source of weights: a Hugging Face folder, a GGUF file, or "package:NAME/FILE" inside an installed package."""

    @model_validator(mode="before")
    @classmethod
    def _default_head_width(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kv_channels") is None:
            hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
            if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
                return {**values, "kv_channels": hidden // heads}
        return values

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups {self.num_query_groups} must divide num_attention_heads {self.num_attention_heads}"
            )
        if self.kv_channels % 2:
            raise ValueError(f"kv_channels {self.kv_channels} must be even: rotary positions turn pairs of channels")
        return self

    def first_difference(
        self, architecture: Mapping[str, Any], ignore: Collection[str] = ()
    ) -> tuple[str, Any, Any] | None:
        """The first field in which an architecture kept elsewhere computes another function than this one.

        Args:
            architecture: ``model_dump(mode="json")`` of another model. Fields this version does not know count.
            ignore: fields that may differ, beside name, origin and longest sequence.

        Returns:
            The field, its value there and its value here; None where there is no difference.
        """
        ours = self.model_dump(mode="json")
        for name, theirs in architecture.items():
            if name not in _NO_FUNCTION and name not in ignore and ours.get(name) != theirs:
                return name, theirs, ours.get(name)
        return None

    def with_layers(self, num_layers: int) -> ModelConfig:
        """The same architecture with another depth, named ``<name>_<n>layers`` and without a source of weights."""
        name = f"{self.name}_{num_layers}layers"
        return self.model_copy(update={"num_layers": num_layers, "name": name, "hf": None})
