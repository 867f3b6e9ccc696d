"""h·Wᵀ as the references differentiate it: one node of autograd whose products are those of ``projection.py``.

On a GPU with 16-bit inputs the references must multiply as the fused loss does, on tensor cores into float32: widened
to float32 first, the same products take some ten times as long, and a comparison would measure that.

n tokens, D hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from megatron_kd.losses.projection import Projection


class HeadProduct:
    """The product with a head, for any number of blocks of tokens; the head's gradients add up in ``dtype``.

    Where the GEMM cannot write ``dtype`` from 16-bit inputs, hidden states and head are widened and autograd does the
    rest.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """``weight`` [V, D]; ``dtype``: float32, or float64 for float64 inputs."""
        self._dtype = dtype
        self._projection = Projection(weight, slice(None), dtype)
        self._native = self._projection.native(weight)
        self.head = stand_in(weight, dtype) if self._native else weight.to(dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] → [n, V] in ``dtype``."""
        if self._native:
            return product(hidden.to(self._projection.head.dtype), self.head, self._projection)
        return linear(hidden.to(self._dtype), self.head)


def stand_in(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, D] zeros of ``dtype`` without memory: where gradients of a head meet that are summed in that dtype."""
    result: Tensor = _Stand.apply(weight, dtype)
    return result


def product(hidden: Tensor, stand: Tensor, projection: Projection) -> Tensor:
    """[n, D]·Wᵀ → [n, V]; W is the projection's, its gradient goes to ``stand``."""
    result: Tensor = _Product.apply(hidden, stand, projection)
    return result


class _Stand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=dtype).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stand: Tensor, projection: Projection) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.projection = projection
        logits = hidden.new_empty((hidden.shape[0], projection.head.shape[0]), dtype=projection.dtype)
        projection.logits(hidden, logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (hidden,) = ctx.saved_tensors
        projection: Projection = ctx.projection
        wants_hidden, wants_head, _ = ctx.needs_input_grad
        # The logits are in the dtype of the arithmetic, and so is their gradient.
        dz = projection.narrow(gradient, hidden)
        dh = projection.hidden_gradient(dz, hidden).to(hidden.dtype) if wants_hidden else None
        dw = None
        if wants_head:
            dw = gradient.new_empty(projection.head.shape)
            projection.add_weight_gradient(dz, hidden, dw, first=True)
        return dh, dw, None
