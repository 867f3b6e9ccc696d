"""How Hugging Face's tensors become one Megatron-Core tensor, and back: each layout does both.

H hidden, F FFN width, V vocabulary, d head size, G query groups (key-value heads), R query heads per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig


class Layout(Protocol):
    """A bijection between Hugging Face's tensors of one entry and the whole (unsharded) Megatron tensor.

    Both methods raise ValueError or RuntimeError where a shape does not fit the model.

    Attributes:
        paired: the tensor is two matrices one below the other, which tensor parallelism splits each by itself.
    """

    paired: bool

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """The Megatron tensor, where paired with the two halves in a leading dimension: [2, F, …]."""
        ...

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """Hugging Face's tensors, from the Megatron tensor in its own shape."""
        ...


class Same:
    """One tensor, the same in both."""

    paired = False

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return tensors[0]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        return [tensor]


SAME = Same()


class Vocabulary:
    """[V, H]; Megatron's may have rows of padding at its end."""

    paired = False

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        # Fewer or more rows would vanish in the padding unseen.
        if tensors[0].shape[0] != model.vocab_size:
            raise ValueError(f"{tensors[0].shape[0]} rows for a vocabulary of {model.vocab_size}")
        return tensors[0]

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        return [tensor[: model.vocab_size]]


class QueryKeyValue:
    """q [G·R·d, …], k [G·d, …], v [G·d, …] ↔ [G·(R+2)·d, …]: per group its queries, then its key, then its value."""

    paired = False

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        groups, d = model.num_query_groups, model.kv_channels
        q, k, v = (t.reshape(groups, -1, *t.shape[1:]) for t in tensors)
        if q.shape[1] * groups != model.num_attention_heads * d:
            raise ValueError(f"{q.shape[1] * groups} query rows for {model.num_attention_heads} heads of {d} channels")
        return torch.cat((q, k, v), dim=1).reshape(-1, *tensors[0].shape[1:])

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        groups, d = model.num_query_groups, model.kv_channels
        queries = model.num_attention_heads // groups * d
        parts = tensor.reshape(groups, queries + 2 * d, *tensor.shape[1:]).split((queries, d, d), dim=1)
        return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


class GateAndUp:
    """gate [F, …], up [F, …] ↔ [2·F, …], all gate rows first; a tensor-parallel rank holds its slice of both."""

    paired = True

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return torch.stack(list(tensors))

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        gate, up = tensor.reshape(2, -1, *tensor.shape[1:])
        return [gate, up]


class InterleavedGateAndUp:
    """One expert's [H, 2·F] or [2·F] with gate and up in turn ↔ [2·F, H] or [2·F], all gate rows first."""

    paired = True

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        rows = tensors[0].t() if tensors[0].dim() == 2 else tensors[0]
        return torch.stack((rows[0::2], rows[1::2]))

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        gate, up = tensor.reshape(2, -1, *tensor.shape[1:])
        rows = torch.stack((gate, up), dim=1).reshape(tensor.shape)
        return [rows.t().contiguous() if tensor.dim() == 2 else rows]


class Transposed:
    """A matrix kept as its transpose."""

    paired = False

    def to_megatron(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return tensors[0].t()

    def to_hf(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        return [tensor.t().contiguous()]
