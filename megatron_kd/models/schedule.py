"""Micro batches through Megatron-Core's schedule, in whatever layout: training, evaluation and teachers share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_kd.models.parallel import ParallelGroups

IN_FLIGHT = 4
"""Micro batches for each stage that go through a pipeline together: a fifth of the time is then fill and drain."""


def micro_batches_together(groups: ParallelGroups) -> int:
    """Forward passes worth running in one schedule: one where there are no stages to keep busy."""
    return IN_FLIGHT * groups.pp_size if groups.pp_size > 1 else 1


def run_schedule[T](
    module: torch.nn.Module,
    groups: ParallelGroups,
    micro_batches: Sequence[T],
    forward: Callable[[torch.nn.Module, T], tuple[Tensor, Callable[[Tensor], Any]]],
    *,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Runs micro batches forward (and backward) over the stages of a pipeline. Collective over the model's ranks.

    Args:
        module: the model, or what wraps it for training.
        micro_batches: as many on every rank; each of ``micro_batch_size`` rows where there are several stages.
        forward: called with the module and one micro batch; returns the module's output and, for the last stage, what
            makes of that output the loss and the report.
        seq_length: of whole rows, before context parallelism.

    Returns:
        The reports in the order of the micro batches on the last stage; nothing on the others.
    """

    def step(source: Iterator[T], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return forward(model, next(source))

    neighbours = {}
    if groups.pp_size > 1:
        neighbours["p2p_communicator"] = P2PCommunicator(pp_group=groups.pp_group, config=get_model_config(module))
    reports: list[Any] = get_forward_backward_func(pp_size=groups.pp_size, vp_size=None)(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[module],
        num_microbatches=len(micro_batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        pg_collection=groups.collection,
        **neighbours,
    )
    return reports
