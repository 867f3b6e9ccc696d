"""A second layout over the same ranks, for a model that stands beside another.

Models are given their groups, but Megatron-Core keeps those of one layout in its module ``parallel_state`` as well, and
there several of its parts still look: the replica ids of sharded checkpoints, random states, layer offsets, the
exchange buffers of experts, gradient reductions. So each layout has values of its own for the whole module, which
stand there while its model is built, loaded or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron.core import parallel_state

from megatron_kd.config import ParallelismConfig
from megatron_kd.models.parallel import ParallelGroups, current_groups, make_groups

_SHARED = "_GLOBAL_MEMORY_BUFFER"
"""What belongs to no layout: memory that exchanges reuse."""


@dataclass(frozen=True)
class SecondLayout:
    """Groups that ``parallel_state`` holds while they are ``active``."""

    groups: ParallelGroups
    _values: dict[str, Any]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts this layout in the place of the one that is there. Not for several threads at once."""
        before = _values()
        vars(parallel_state).update(self._values)
        try:
            yield
        finally:
            vars(parallel_state).update(before)


def join_second_layout(parallelism: ParallelismConfig, timeout: timedelta = timedelta(minutes=10)) -> SecondLayout:
    """Makes the groups of another layout and leaves those that are there in place. Collective over all ranks.

    Nothing is seeded: random states go on as those of the first layout.

    Raises:
        LaunchError: the number of ranks is not a multiple of the model-parallel size.
    """
    before = _values()
    vars(parallel_state).update({name: {} if isinstance(value, dict) else None for name, value in before.items()})
    try:
        make_groups(parallelism, timeout)
        return SecondLayout(current_groups(parallelism), {**_values(), _SHARED: before[_SHARED]})
    finally:
        vars(parallel_state).update(before)


def _values() -> dict[str, Any]:
    """All that the module keeps of a layout: its upper-case names."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
