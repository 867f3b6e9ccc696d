"""Megatron-Core's optimizer with a question between clipping and update: whether this update may be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

Norm = float | torch.Tensor
"""Megatron-Core keeps the norm on the device where Transformer Engine or apex can scale by it there."""


class GuardedOptimizer(ChainedOptimizer):
    """All of ``ChainedOptimizer``; its ``step`` is Megatron-Core's own, so that clipping stays what it is there."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        """``optimizer``: as ``get_megatron_optimizer`` makes it, a chain even of one."""
        assert isinstance(optimizer, ChainedOptimizer)
        super().__init__(optimizer.chained_optimizers)
        self._allow: Callable[[Norm], bool] | None = None
        self._norm: Norm = 0.0

    def step_if(self, allow: Callable[[Norm], bool]) -> bool:
        """``step``, where ``allow`` says so of the gradient's norm; otherwise weights, moments and steps stay.

        The norm is the one that clipping has computed: nothing passes over the gradients once more. Collective over all
        ranks, on which ``allow`` must say the same.

        Returns:
            Whether the update was made.
        """
        self._allow = allow
        try:
            updated, _, _ = self.step()
        finally:
            self._allow = None
        return bool(updated)

    def get_grad_norm(self) -> Any:
        """The norm before clipping; kept for the question."""
        self._norm = super().get_grad_norm()
        return self._norm

    def step_with_ready_grads(self) -> bool:
        """Asks, then updates."""
        if self._allow is not None and not self._allow(self._norm):
            return False
        return bool(super().step_with_ready_grads())
