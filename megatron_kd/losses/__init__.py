"""Divergences between a student's head and a teacher, without the [tokens, vocabulary] matrix.

``linear_topk_divergence`` (cached top-K targets) and ``linear_full_divergence`` (a teacher beside the student) are
fused with the projection by the head and its gradients; ``IMPLEMENTATIONS`` holds them beside two references.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_kd.losses.divergences import DIVERGENCES, TAILS
    from megatron_kd.losses.full import FullDivergence
    from megatron_kd.losses.geometry import default_chunk_bytes
    from megatron_kd.losses.implementations import (
        IMPLEMENTATIONS,
        Implementation,
        dense_full_divergence,
        dense_topk_divergence,
        forward_chunked_full_divergence,
        forward_chunked_topk_divergence,
        linear_full_divergence,
        linear_topk_divergence,
    )
    from megatron_kd.losses.memory import peak_extra_bytes
    from megatron_kd.losses.output import DivergenceOutput, DivergenceStatistics
    from megatron_kd.losses.topk import TopKDivergence
    from megatron_kd.losses.transfer import to_device

__all__ = [
    "DIVERGENCES",
    "IMPLEMENTATIONS",
    "TAILS",
    "DivergenceOutput",
    "DivergenceStatistics",
    "FullDivergence",
    "Implementation",
    "TopKDivergence",
    "default_chunk_bytes",
    "dense_full_divergence",
    "dense_topk_divergence",
    "forward_chunked_full_divergence",
    "forward_chunked_topk_divergence",
    "linear_full_divergence",
    "linear_topk_divergence",
    "peak_extra_bytes",
    "to_device",
]

# Loaded when first asked for: ``sizes`` alone needs no torch, and a plan starts without it.
_HOMES = {
    "DIVERGENCES": "divergences",
    "DivergenceOutput": "output",
    "DivergenceStatistics": "output",
    "FullDivergence": "full",
    "IMPLEMENTATIONS": "implementations",
    "Implementation": "implementations",
    "TAILS": "divergences",
    "TopKDivergence": "topk",
    "default_chunk_bytes": "geometry",
    "dense_full_divergence": "implementations",
    "dense_topk_divergence": "implementations",
    "forward_chunked_full_divergence": "implementations",
    "forward_chunked_topk_divergence": "implementations",
    "linear_full_divergence": "implementations",
    "linear_topk_divergence": "implementations",
    "peak_extra_bytes": "memory",
    "to_device": "transfer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
