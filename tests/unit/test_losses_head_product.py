"""The references' product with a head in its form for tensor cores, run here by the products of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_kd.losses.head_product import product, stand_in
from megatron_kd.losses.projection import Projection

D, V = 24, 301


def gradients(dtype: torch.dtype, blocks: int) -> tuple[list[Tensor], list[Tensor]]:
    """(logits, dH, dW) by the node, and by autograd in float64 from the same inputs."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3 * blocks, D, generator=generator).to(dtype)
    head = torch.randn(V, D, generator=generator).to(dtype)
    upstream = torch.randn(3 * blocks, V, generator=generator)

    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    stand, projection = stand_in(w, torch.float32), Projection(w, slice(None), torch.float32)
    logits = torch.cat([product(part, stand, projection) for part in h.split(3)])
    assert logits.dtype is torch.float32
    (logits * upstream).sum().backward()
    assert h.grad is not None and w.grad is not None
    assert h.grad.dtype is dtype and w.grad.dtype is dtype

    h64, w64 = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = h64 @ w64.t()
    (exact * upstream.double()).sum().backward()
    assert h64.grad is not None and w64.grad is not None
    return [logits.detach(), h.grad, w.grad], [exact.detach(), h64.grad, w64.grad]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_product_and_gradients_equal_float64(dtype: torch.dtype, rounding: float) -> None:
    ours, exact = gradients(dtype, blocks=2)
    assert (ours[0] - exact[0]).abs().max() <= 2e-6 * exact[0].abs().max(), "logits are never rounded to 16 bits"
    for got, wanted in zip(ours[1:], exact[1:], strict=True):
        assert ((got.double() - wanted).abs() <= rounding * wanted.abs() + 2e-5).all()


def test_a_head_gradient_is_summed_over_blocks_before_it_is_rounded() -> None:
    ours, exact = gradients(torch.bfloat16, blocks=200)
    # One rounding to 8 bits, whatever the number of blocks; summed in bfloat16 it would be some ten.
    assert ((ours[2].double() - exact[2]).abs() <= 2**-8 * exact[2].abs() + 1e-4).all()


def test_the_stand_in_takes_no_memory() -> None:
    assert stand_in(torch.zeros(V, D), torch.float32).untyped_storage().nbytes() == 4
