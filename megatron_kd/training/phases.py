"""What a rank is doing, how long each phase took, and how much memory it needed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise

from torch.profiler import record_function

from megatron_kd.device import Moment, can_reset_peak_memory, peak_memory_bytes, reset_peak_memory

STEP_PHASES = ("data", "teacher", "forward_backward", "gradients", "optimizer")
"""Of a training step, in order: waiting for rows (and for ranks that wait for theirs), an online teacher's passes, the
student's and the loss, the reduction of gradients over ranks, the optimizer."""
BETWEEN = ("checkpoint", "evaluation")
"""Phases between two steps."""
OUTSIDE = "other"
"""What ``current`` is outside of all phases."""


class Phases:
    """The phases of one rank. A phase within another interrupts it: every moment belongs to one phase alone.

    On a GPU moments are events on the current stream, so that phases are timed without waiting for the device. In a
    profiler's trace every phase is a named range.

    Attributes:
        current: the phase that this rank is in; another thread may read it.
        iteration: the step that is worked on, from 1; 0 before the first.
        failed_in: the phase that an error came out of first; None as long as there was none.
        last_beat: when something got done last, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.current = OUTSIDE
        self.iteration = 0
        self.failed_in: str | None = None
        self.last_beat = time.monotonic()
        self._moments: list[tuple[str, Moment]] = []
        self._peaks: dict[str, int] = {}
        self._splits_memory = can_reset_peak_memory()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Is in a phase while entered."""
        before = self.current
        self._change(name)
        try:
            with record_function(name):
                yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._change(before)

    def beat(self) -> None:
        """Something got done within a phase: a micro batch, a batch of an evaluation."""
        self.last_beat = time.monotonic()

    def _change(self, name: str) -> None:
        self._moments.append((name, Moment.now()))
        self._keep_peak()
        self.current = name
        self.beat()

    def _keep_peak(self) -> None:
        peak = peak_memory_bytes()
        self._peaks[self.current] = max(self._peaks.get(self.current, 0), peak)
        if self._splits_memory:
            reset_peak_memory()

    def begin_step(self) -> None:
        """Forgets the times so far: those of the next step are wanted."""
        self._moments.clear()

    def seconds(self) -> dict[str, float]:
        """Seconds in each phase since ``begin_step``. The device has reached the last change of phase."""
        total: dict[str, float] = {}
        for (name, start), (_, end) in pairwise(self._moments):
            total[name] = total.get(name, 0.0) + start.seconds_until(end)
        total.pop(OUTSIDE, None)
        return total

    def begin_memory(self) -> None:
        """Forgets the peaks so far."""
        reset_peak_memory()
        self._peaks.clear()

    def take_peaks(self, names: Collection[str]) -> dict[str, int]:
        """Bytes at the peak of some phases since they were last taken; those that have not been entered are left out.

        Where the peak of a process cannot be started anew (not on Linux), that of the process, as ``other``.
        """
        self._keep_peak()
        if not self._splits_memory:
            return {OUTSIDE: max(self._peaks.values())} if OUTSIDE in names else {}
        return {name: self._peaks.pop(name) for name in names if name in self._peaks}
