"""Megatron-Core's contract for a weight gradient that is accumulated into ``main_grad`` rather than returned."""

from __future__ import annotations

import torch
from torch import Tensor

# Placeholders are never read, so one per shape serves every head; zeros where something is added to them.
_placeholders: dict[tuple[torch.Size, torch.dtype, torch.device, bool], Tensor] = {}


def check_main_grad(weight: Tensor) -> None:
    """Raises ValueError when the head has no ``main_grad`` of its own shape."""
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor) or main_grad.shape != weight.shape:
        raise ValueError(
            "main_grad_accumulation needs a head with a main_grad of its shape (Megatron-Core's DDP makes it, with "
            "gradient_accumulation_fusion); this one has "
            f"{'none' if main_grad is None else tuple(getattr(main_grad, 'shape', ()))}"
        )


def main_grad_of(weight: Tensor) -> Tensor:
    """The buffer [Vl, D] that gradients are added to."""
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return main_grad


def accumulate_main_grad(weight: Tensor, gradient: Tensor, upstream: Tensor) -> None:
    """main_grad += upstream·gradient; ``gradient`` may be overwritten."""
    main_grad = main_grad_of(weight)
    if main_grad.dtype == gradient.dtype:
        main_grad.addcmul_(gradient, upstream)
    else:
        main_grad.add_(gradient.mul_(upstream))


def wgrad_placeholder(weight: Tensor) -> Tensor | None:
    """What backward returns for a head whose main_grad holds the gradient, as Megatron-Core's linear layers do.

    With ``grad_added_to_main_grad`` the flag is set and a tensor that nobody reads is returned, so that DDP's hooks
    run: zeros with ``zero_out_wgrad`` (a tied embedding adds to it), else uninitialised. Without the flag: None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zeros = bool(getattr(weight, "zero_out_wgrad", False))
    key = (weight.shape, weight.dtype, weight.device, zeros)
    if key not in _placeholders:
        make = torch.zeros if zeros else torch.empty
        _placeholders[key] = make(weight.shape, dtype=weight.dtype, device=weight.device)
    elif zeros:
        _placeholders[key].zero_()
    return _placeholders[key].detach()
