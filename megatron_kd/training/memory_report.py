"""What is said where memory runs out in training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_kd.config import Recipe
from megatron_kd.device import dump_memory_snapshot, is_out_of_memory, memory_figures, record_memory_history
from megatron_kd.errors import MemoryExhaustedError
from megatron_kd.training.phases import Phases

logger = logging.getLogger(__name__)


@contextmanager
def out_of_memory_explained(recipe: Recipe, phases: Phases, snapshot: Path) -> Iterator[None]:
    """Turns the error of an allocation into one line: where it happened, the figures, what to change.

    Args:
        snapshot: written where ``training.memory_snapshot`` asks for it and there is a CUDA device.

    Raises:
        MemoryExhaustedError: in place of what torch raised; the other ranks end as they do when a rank dies.
    """
    recording = recipe.training.memory_snapshot and record_memory_history()
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        figures = memory_figures()
        written = ""
        if recording:
            dump_memory_snapshot(snapshot)
            written = f"; snapshot for pytorch.org/memory_viz: {snapshot}"
        phase = phases.failed_in or phases.current
        logger.error("out of memory in phase %s: %s", phase, error)
        raise MemoryExhaustedError(
            f"out of memory in phase {phase}: {figures} ({str(error).splitlines()[0]}){written}; try "
            f"{', '.join(remedies(recipe, phase))}; megatron-kd plan RECIPE --suggest finds layouts that fit"
        ) from error


def remedies(recipe: Recipe, phase: str) -> list[str]:
    """Overrides that lower the peak and are not set yet, cheapest first."""
    training, found = recipe.training, []
    if training.micro_batch_size > 1:
        found.append("training.micro_batch_size=1")
    if recipe.loss.implementation != "fused":
        found.append("loss.implementation=fused")
    elif phase != "optimizer":
        found.append("a smaller loss.chunk_mib")
    if training.recompute_granularity is None:
        found.append("training.recompute_granularity=selective")
    if training.recompute_granularity != "full":
        found.append("training.recompute_granularity=full")
    if recipe.teacher.mode == "online":
        found.append("teacher.mode=offline")
    found.append(f"parallelism.context_parallel_size={2 * recipe.parallelism.context_parallel_size}")
    return found
