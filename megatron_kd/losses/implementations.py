"""The three implementations, equal in value and gradient, and the public functions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.chunks import Head
from megatron_kd.losses.dense import run_dense_full, run_dense_topk
from megatron_kd.losses.forward_chunked import run_forward_chunked
from megatron_kd.losses.full import FullDivergence, FullSettings
from megatron_kd.losses.full_kernel import FullKernel
from megatron_kd.losses.fused import run_fused
from megatron_kd.losses.output import DivergenceOutput
from megatron_kd.losses.topk import TopKDivergence, TopKSettings
from megatron_kd.losses.topk_kernel import TopKKernel
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class Implementation:
    """One way to compute the losses; each of the two callables has one signature in all implementations."""

    topk: TopKDivergence
    full: FullDivergence


def _fused_topk(
    hidden: Tensor, weight: Tensor, targets: TopKTargets, arguments: LossArguments, settings: TopKSettings
) -> DivergenceOutput:
    kernel = TopKKernel(arguments, targets, settings.divergence, settings.tail)
    return run_fused(
        hidden,
        weight,
        None,
        arguments,
        kernel,
        mode=settings.mode,
        chunk_bytes=settings.chunk_bytes,
        main_grad_accumulation=settings.main_grad_accumulation,
    )


def _fused_full(
    hidden: Tensor, weight: Tensor, teacher: Head, arguments: LossArguments, settings: FullSettings
) -> DivergenceOutput:
    return run_fused(
        hidden,
        weight,
        teacher,
        arguments,
        FullKernel(arguments, settings.teacher_logit_softcap),
        mode=settings.mode,
        chunk_bytes=settings.chunk_bytes,
        main_grad_accumulation=settings.main_grad_accumulation,
    )


def _forward_chunked_topk(
    hidden: Tensor, weight: Tensor, targets: TopKTargets, arguments: LossArguments, settings: TopKSettings
) -> DivergenceOutput:
    kernel = TopKKernel(arguments, targets, settings.divergence, settings.tail)
    return run_forward_chunked(hidden, weight, None, arguments, kernel, chunk_bytes=settings.chunk_bytes)


def _forward_chunked_full(
    hidden: Tensor, weight: Tensor, teacher: Head, arguments: LossArguments, settings: FullSettings
) -> DivergenceOutput:
    kernel = FullKernel(arguments, settings.teacher_logit_softcap)
    return run_forward_chunked(hidden, weight, teacher, arguments, kernel, chunk_bytes=settings.chunk_bytes)


def _dense_topk(
    hidden: Tensor, weight: Tensor, targets: TopKTargets, arguments: LossArguments, settings: TopKSettings
) -> DivergenceOutput:
    return run_dense_topk(hidden, weight, targets, arguments, settings.tail)


def _dense_full(
    hidden: Tensor, weight: Tensor, teacher: Head, arguments: LossArguments, settings: FullSettings
) -> DivergenceOutput:
    return run_dense_full(hidden, weight, teacher, arguments, settings.teacher_logit_softcap)


linear_topk_divergence = TopKDivergence(_fused_topk)
linear_full_divergence = FullDivergence(_fused_full)
forward_chunked_topk_divergence = TopKDivergence(_forward_chunked_topk)
forward_chunked_full_divergence = FullDivergence(_forward_chunked_full)
dense_topk_divergence = TopKDivergence(_dense_topk)
dense_full_divergence = FullDivergence(_dense_full)

IMPLEMENTATIONS: dict[str, Implementation] = {
    "dense": Implementation(dense_topk_divergence, dense_full_divergence),
    "forward_chunked": Implementation(forward_chunked_topk_divergence, forward_chunked_full_divergence),
    "fused": Implementation(linear_topk_divergence, linear_full_divergence),
}
