"""The three implementations, equal in value and gradient, and the public functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments, Settings, check_values
from megatron_kd.losses.autograd import Source, run_fused
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.dense import run_dense_full, run_dense_topk
from megatron_kd.losses.forward_chunked import run_forward_chunked
from megatron_kd.losses.full import FullDivergence
from megatron_kd.losses.op import run_operator
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.topk import TopKDivergence
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class Implementation:
    """One way to compute the losses; each of the two callables has one signature in all implementations."""

    topk: TopKDivergence
    full: FullDivergence


def _fused(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    # The operator checks the values itself, and returns gradients, which main_grad has no use for.
    if torch.compiler.is_compiling() and not settings.main_grad_accumulation:
        return run_operator(hidden, weight, source, arguments, settings)
    return _fused_eager(hidden, weight, source, arguments, settings)


@torch.compiler.disable
def _fused_eager(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    _check_values(arguments, source)
    return run_fused(hidden, weight, source, arguments, settings)


def _forward_chunked(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    _check_values(arguments, source)
    return run_forward_chunked(hidden, weight, source, arguments, settings)


def _dense(
    hidden: Tensor, weight: Tensor, source: Source, arguments: LossArguments, settings: Settings
) -> DivergenceOutput:
    _check_values(arguments, source)
    if isinstance(source, TopKTargets):
        return run_dense_topk(hidden, weight, source, arguments, settings)
    return run_dense_full(hidden, weight, source, arguments, settings)


def _check_values(arguments: LossArguments, source: Source) -> None:
    check_values(arguments, None if isinstance(source, Head) else source)


linear_topk_divergence = TopKDivergence(_fused)
linear_full_divergence = FullDivergence(_fused)
forward_chunked_topk_divergence = TopKDivergence(_forward_chunked)
forward_chunked_full_divergence = FullDivergence(_forward_chunked)
dense_topk_divergence = TopKDivergence(_dense)
dense_full_divergence = FullDivergence(_dense)

IMPLEMENTATIONS: dict[str, Implementation] = {
    "dense": Implementation(dense_topk_divergence, dense_full_divergence),
    "forward_chunked": Implementation(forward_chunked_topk_divergence, forward_chunked_full_divergence),
    "fused": Implementation(linear_topk_divergence, linear_full_divergence),
}
