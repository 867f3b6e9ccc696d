"""The architecture of a model, under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import PathString, Section
from megatron_kd.config.rope import RopeScaling

_NO_FUNCTION = {"name", "hf", "max_position_embeddings"}
"""Fields that do not change what the weights compute."""
_SHORT = {"num_moe_experts": "experts", "ffn_hidden_size": "ffn", "num_query_groups": "groups"}
"""What the name of a model that was cut calls what is left."""
MOE_FAMILIES = ("gpt_oss",)
WINDOW_FAMILIES = ("gpt_oss",)
Positive = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    """A decoder-only transformer and where its weights come from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Short name, used in reports and in the names of derived students."""
    family: Literal["llama", "qwen3", "gpt_oss"] = "llama"
    """Architecture: RMSNorm, SwiGLU, rotary positions and no biases for llama; qwen3 has a norm of queries and keys as
    well; gpt_oss has experts, attention sinks, sliding windows, biases and a clamped SwiGLU."""
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the gated feed-forward layer (of one of its two halves), of one expert where there are experts."""
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
    num_moe_experts: Positive | None = None
    """Experts of each layer; null: one dense feed-forward layer."""
    moe_router_topk: Positive | None = None
    """Experts that each token is sent to."""
    window_size: Positive | None = None
    """Positions that a sliding-window layer sees, its own included; null: all layers see everything before."""
    window_attn_skip_freq: Positive | list[Literal[0, 1]] | None = None
    """Which layers slide: n: all but every n-th; a list of one number a layer: 1 slides, 0 sees everything."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary positions for long contexts: rope_type llama3 or yarn with their values."""
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

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        experts, chosen = self.num_moe_experts, self.moe_router_topk
        if (experts is not None) != (self.family in MOE_FAMILIES):
            raise ValueError(
                f"num_moe_experts is {experts}, but family {self.family} "
                f"{'has experts: say how many' if experts is None else 'has none: remove it'}"
            )
        if (experts is None) != (chosen is None):
            raise ValueError(f"num_moe_experts is {experts} and moe_router_topk {chosen}: give both or neither")
        if experts is not None and chosen is not None and chosen > experts:
            raise ValueError(f"moe_router_topk {chosen} is more than num_moe_experts {experts}")
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        pattern = self.window_attn_skip_freq
        if self.window_size is not None and self.family not in WINDOW_FAMILIES:
            raise ValueError(f"window_size is {self.window_size}, but family {self.family} has no windows: remove it")
        if self.window_size is None and pattern is not None:
            raise ValueError(f"window_attn_skip_freq is {pattern}, but there is no window: give window_size")
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            raise ValueError(
                f"window_attn_skip_freq lists {len(pattern)} layers, num_layers is {self.num_layers}: list every layer"
            )
        return self

    def layer_windows(self) -> list[int | None]:
        """For each layer the positions it sees, its own included; None where it sees everything before."""
        slides = _slides(self.window_attn_skip_freq, self.num_layers)
        return [self.window_size if slide else None for slide in slides]

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
        ours = _by_layer(self.model_dump(mode="json"))
        defaults = {key: field.default for key, field in type(self).model_fields.items() if not field.is_required()}
        # An architecture written before a field existed is one that has its default.
        others = _by_layer({**defaults, **architecture})
        for name, theirs in others.items():
            if name not in _NO_FUNCTION and name not in ignore and ours.get(name) != theirs:
                return name, theirs, ours.get(name)
        return None

    def cut(
        self,
        layers: Sequence[int],
        *,
        num_moe_experts: int | None = None,
        ffn_hidden_size: int | None = None,
        num_query_groups: int | None = None,
    ) -> ModelConfig:
        """The same architecture with chosen layers and fewer experts, FFN rows or query groups alone.

        It has no source of weights, and its name says what is left: ``<name>_<n>layers`` and so on. A kept layer keeps
        its window: the alternation of the others is no matter. A kept group keeps all its query heads.

        Args:
            layers: indices from 0 of the layers, rising.
            num_moe_experts, ffn_hidden_size, num_query_groups: how many are left; None: all.

        Raises:
            ValueError: more than there are, or fewer experts than each token is sent to.
        """
        left = {
            "num_moe_experts": num_moe_experts,
            "ffn_hidden_size": ffn_hidden_size,
            "num_query_groups": num_query_groups,
        }
        changes: dict[str, Any] = {"num_layers": len(layers), "hf": None}
        name = f"{self.name}_{len(layers)}layers"
        for key, count in left.items():
            if count is None:
                continue
            if count > (getattr(self, key) or 0):
                raise ValueError(f"from_teacher.{key} {count} is more than the teacher's {key} {getattr(self, key)}")
            changes[key] = count
            name += f"_{count}{_SHORT[key]}"
        if num_query_groups is not None:
            changes["num_attention_heads"] = self.num_attention_heads // self.num_query_groups * num_query_groups
        if num_moe_experts is not None and self.moe_router_topk is not None and self.moe_router_topk > num_moe_experts:
            raise ValueError(
                f"from_teacher leaves {num_moe_experts} of {self.num_moe_experts} experts, but each token is sent to "
                f"moe_router_topk {self.moe_router_topk}: keep at least as many"
            )
        if self.window_size is not None:
            windows = self.layer_windows()
            changes["window_attn_skip_freq"] = [0 if windows[layer] is None else 1 for layer in layers]
        return self.model_copy(update={**changes, "name": name})


def _slides(pattern: Any, layers: int) -> list[int]:
    """One number a layer: 1 slides, 0 sees everything before."""
    if isinstance(pattern, int):
        return [1 if (layer + 1) % pattern else 0 for layer in range(layers)]
    return [1] * layers if pattern is None else list(pattern)


def _by_layer(architecture: dict[str, Any]) -> dict[str, Any]:
    """Windows as one number a layer, so that the ways to write them compare."""
    layers = architecture.get("num_layers")
    if architecture.get("window_size") is None or not isinstance(layers, int):
        return architecture
    return {**architecture, "window_attn_skip_freq": _slides(architecture.get("window_attn_skip_freq"), layers)}
