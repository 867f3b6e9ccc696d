"""Whether other processes wanted the cores that a measurement ran on."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Of a core, this much may be wanted beyond what there is before times are called into question.
_TOLERANCE = 0.2


class Neighbours:
    """Counts the CPU time that other processes and machines take, from its making on. Linux; elsewhere it sees none."""

    def __init__(self) -> None:
        self._started = self._now()

    def cores(self) -> float:
        """How many cores other processes have kept busy on average."""
        passed, busy, own = (now - before for now, before in zip(self._now(), self._started, strict=True))
        return max(0.0, (busy - own) / passed) if passed > 0 else 0.0

    def notes(self, threads: int) -> list[str]:
        """A line for the reader where the threads and the other processes wanted more cores than there are.

        Threads that wait for each other then wait for those processes too. Interleaving does not help: passes of many
        small operators lose far more than three large GEMMs.
        """
        others, cores = self.cores(), os.cpu_count() or 1
        if others + threads <= cores + _TOLERANCE:
            return []
        return [
            f"other processes kept {others:.1f} of the {cores} cores busy, and {threads} threads were wanted: "
            "do not trust the times; wait until the machine is idle, or take fewer --threads"
        ]

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: of the clock, of busy cores (all of the machine), of this process's cores."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        except OSError:
            return time.monotonic(), 0.0, time.process_time()
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()
