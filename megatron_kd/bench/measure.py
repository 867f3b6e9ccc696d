"""Measuring passes: counted FLOPs and bytes once, time over interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.bench.cases import Case, Pass
from megatron_kd.bench.memory import is_out_of_memory, pool_growths, release_memory
from megatron_kd.device.platform import CPU_NAME, peak_memory_bytes, reset_peak_memory, synchronize
from megatron_kd.losses import peak_extra_bytes
from megatron_kd.progress import Advance


@dataclass
class Measurement:
    """What was seen of a case.

    Attributes:
        seconds: of each round, as long as it could be run.
        failure: why it could not be run to the end, in one line; ``OUT_OF_MEMORY`` or a peer's own error.
    """

    seconds: list[float] = field(default_factory=list)
    flops: int | None = None
    extra_bytes: int | None = None
    failure: str | None = None

    @property
    def seconds_median(self) -> float | None:
        """Median over the rounds; None for a case that failed."""
        return None if self.failure else statistics.median(self.seconds)

    def ratio_to(self, floor: Measurement) -> float | None:
        """Median over the rounds of this time divided by the floor's in the same round; None if either failed."""
        if self.failure or floor.failure:
            return None
        return statistics.median(own / bare for own, bare in zip(self.seconds, floor.seconds, strict=True))


OUT_OF_MEMORY = "out of memory"


def measure(cases: Sequence[Case], rounds: int, place: torch.device, advance: Advance) -> list[Measurement]:
    """Measures all cases, interleaved round by round after passes that count and warm up: load falls on all alike.

    A case that runs out of memory is left out from then on, as is a peer that raises. Advances by one unit a case for
    the warm-up and for each round.

    Raises:
        Exception: whatever one of our own cases raises other than for want of memory.
    """
    found = [Measurement() for _ in cases]
    steps: list[Callable[[Case, Measurement], None]] = [lambda case, into: _count(case, into, place)]
    steps += [lambda case, into: into.seconds.append(_timed(case, place))] * rounds
    for step in steps:
        for case, measurement in zip(cases, found, strict=True):
            if measurement.failure is None:
                measurement.failure = _failure(step, case, measurement)
                if measurement.failure is not None:
                    measurement.extra_bytes = None
                    release_memory(place)  # not before the error and the frames it holds are gone
            advance(1, case.name)
    return found


def _failure(step: Callable[[Case, Measurement], None], case: Case, measurement: Measurement) -> str | None:
    """Runs one step; one line that says why it could not be run, or None."""
    try:
        step(case, measurement)
    except Exception as error:
        if is_out_of_memory(error):
            return OUT_OF_MEMORY
        if not case.peer:
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _count(case: Case, into: Measurement, place: torch.device) -> None:
    run = case.prepare()
    into.flops = count_flops(run)
    into.extra_bytes = extra_bytes(run, place)


def _timed(case: Case, place: torch.device) -> float:
    """Seconds of one pass with a warm pool of device memory.

    Where memory is scarce, the passes of other cases push this one's blocks out of the allocator's pool, and fetching
    them back stops the device, which no training step does again and again: such a pass is repeated once.
    """
    run = case.prepare()
    growths = pool_growths(place)
    seconds = _seconds(run)
    return seconds if pool_growths(place) == growths else _seconds(run)


def _seconds(run: Pass) -> float:
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def count_flops(run: Pass) -> int:
    """FLOPs of all matrix products of a pass."""

    def added_product(_: Any, left: tuple[int, int], right: tuple[int, int], *__: Any, **___: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    # The counter knows neither products that accumulate in place nor those with a dtype of their own.
    more = dict.fromkeys((torch.ops.aten.addmm_, torch.ops.aten.addmm), added_product)
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        run()
    return int(counter.get_total_flops())


def extra_bytes(run: Pass, place: torch.device) -> int:
    """The most bytes alive at once in tensors that a pass made, gradients included; on a GPU, by its allocator.

    On a CPU the bytes are counted over tensors: scratch memory inside one operator is not seen.
    """
    if place.type == CPU_NAME:
        return peak_extra_bytes(run)
    synchronize()
    reset_peak_memory()
    before = peak_memory_bytes()
    run()
    synchronize()
    return peak_memory_bytes() - before
