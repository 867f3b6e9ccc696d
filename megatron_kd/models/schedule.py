"""Micro batches through Megatron-Core's schedule, in whatever layout: training, evaluation and teachers share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_kd.models.chunks import chunks_of
from megatron_kd.models.parallel import ParallelGroups

IN_FLIGHT = 4
"""Micro batches for each stage that go through a pipeline together: a fifth of the time is then fill and drain."""


def micro_batches_together(groups: ParallelGroups) -> int:
    """Forward passes worth running in one schedule: one where there are no stages to keep busy."""
    return IN_FLIGHT * groups.pp_size if groups.pp_size > 1 else 1


def run_schedule[T](
    module: torch.nn.Module,
    groups: ParallelGroups,
    micro_batches: Iterable[T],
    forward: Callable[[torch.nn.Module, T], tuple[Tensor, Callable[[Tensor], Any]]],
    *,
    number: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Runs micro batches forward (and backward) over the stages of a pipeline. Collective over the model's ranks.

    Args:
        module: the model, or what wraps it for training; interleaved stages come as ``Chunks``.
        micro_batches: taken when a pass needs them; each of ``micro_batch_size`` rows where there are several stages.
        forward: called with the module and one micro batch; returns the module's output and, for the last stage, what
            makes of that output the loss and the report. Of interleaved stages once for each chunk.
        number: of micro batches, the same on every rank; to go backward through interleaved stages a multiple of their
            number (forward alone, the last one is run again until it is).
        seq_length: of whole rows, before context parallelism.

    Returns:
        The reports in the order of the micro batches on the last stage; nothing on the others.
    """
    chunks = chunks_of(module)
    interleaved = len(chunks) > 1
    run = number + (-number % groups.pp_size if interleaved and forward_only else 0)

    def step(source: Iterator[T], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return forward(model, next(source))

    neighbours = {}
    if groups.pp_size > 1:
        neighbours["p2p_communicator"] = P2PCommunicator(pp_group=groups.pp_group, config=get_model_config(chunks[0]))
    source = iter(micro_batches)
    schedule = get_forward_backward_func(pp_size=groups.pp_size, vp_size=len(chunks) if interleaved else None)
    reports: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=_for_each_chunk(source, len(chunks), run - number) if interleaved else source,
        model=chunks,
        num_microbatches=run,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        pg_collection=groups.collection,
        **neighbours,
    )
    return reports[:number]


def _for_each_chunk[T](micro_batches: Iterator[T], chunks: int, missing: int) -> list[Iterator[T]]:
    """The micro batches for every chunk, behind them the last one ``missing`` times again.

    Each is made when the first chunk asks for it, and let go when the last one has it.
    """
    waiting: list[deque[T]] = [deque() for _ in range(chunks)]

    def of(own: deque[T]) -> Iterator[T]:
        while True:
            if not own:
                for micro_batch in islice(micro_batches, 1):
                    for queue in waiting:
                        queue.append(micro_batch)
            if not own:
                break
            last = own.popleft()
            yield last
        yield from repeat(last, missing)

    return [of(own) for own in waiting]
