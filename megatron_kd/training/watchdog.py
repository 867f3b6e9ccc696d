"""A thread that ends a rank which gets nothing done any more, and says where it hung and which rank is missing."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from megatron_kd.config import Recipe
from megatron_kd.console import leave, say_error
from megatron_kd.device import Heartbeats
from megatron_kd.errors import RemoteRankError
from megatron_kd.status import JobStatus
from megatron_kd.training.phases import Phases

SLOW = {"set_up": 4.0, "checkpoint": 4.0, "evaluation": 4.0}
"""Phases that may go without a sign of progress for longer, and by how much."""
EARLY = 0.8
"""Of the collectives' timeout: at this point the stacks are written, before nccl ends the process without them."""
_OFTEN, _SELDOM = 0.05, 10.0
logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the phases of this rank while entered; see ``training.hang_timeout_minutes``."""

    def __init__(
        self,
        phases: Phases,
        log: Path,
        *,
        limit_s: float | None,
        collective_timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            log: where the stacks go: this rank's log.
            limit_s: without progress; None: it only writes the stacks.
            collective_timeout_s: how long collectives wait.
            on_end: called before the process ends.
        """
        self._phases, self._log, self._on_end = phases, log, on_end
        self._limit = limit_s
        self._report_after = EARLY * collective_timeout_s
        shortest = min(self._report_after, limit_s or self._report_after)
        self._every = min(max(shortest / 20, _OFTEN), _SELDOM)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._heartbeats = Heartbeats()

    def __enter__(self) -> Watchdog:
        self._phases.beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(timeout=self._every)

    def missing(self) -> str:
        """The ranks that give no sign of life, in words. Takes a few beats."""
        try:
            silent = self._heartbeats.silent(self._every)
        except RuntimeError:
            return "the first rank, or the launcher, which keeps the ranks' signs of life, does not answer"
        found = [f"rank {rank} ({state})" for rank, state in silent.items()]
        return f"no sign of life from {', '.join(found)}" if found else "all ranks are alive"

    def _watch(self) -> None:
        idle, seen, ticked, reported = 0.0, 0.0, time.monotonic(), False
        while not self._left.wait(self._every):
            self._heartbeats.beat(self._state())
            now = time.monotonic()
            if self._phases.last_beat != seen:
                idle, seen, reported = 0.0, self._phases.last_beat, False
            else:
                # A job that was suspended for an hour has not hung for an hour.
                idle += min(now - ticked, 3 * self._every)
            ticked = now
            slowness = SLOW.get(self._phases.current, 1.0)
            if self._limit is not None and idle > self._limit * slowness:
                self._end(idle)
            elif idle > self._report_after and not reported:
                reported = True
                self._write_stacks()
                logger.warning("nothing done for %.0f s: %s; the stacks are above", idle, self._state())

    def _state(self) -> str:
        return f"iteration {self._phases.iteration}, phase {self._phases.current}"

    def _write_stacks(self) -> None:
        with open(self._log, "a") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _end(self, idle: float) -> None:
        self._write_stacks()
        state = self._state()
        missing = self.missing() if dist.get_world_size() > 1 else "it is alone"
        if self._left.is_set():  # it got away while it was asked about
            return
        message = (
            f"nothing done for {idle:.0f} s in {state}: {missing}; the stacks are in {self._log}; start it again to go "
            "on from the last checkpoint, or raise training.hang_timeout_minutes if this is slow and no hang"
        )
        logger.error(message)
        say_error(message)
        self._on_end()
        leave(1)


@contextmanager
def watching(recipe: Recipe, phases: Phases, log: Path, status: JobStatus) -> Iterator[None]:
    """A watchdog as a recipe asks for it. A collective that ran out of time ends in an error that names missing ranks.

    Raises:
        RemoteRankError: as raised within, with what is known of the others.
    """
    settings = recipe.training
    watchdog = Watchdog(
        phases,
        log,
        limit_s=None if settings.hang_timeout_minutes is None else 60 * settings.hang_timeout_minutes,
        collective_timeout_s=60 * settings.distributed_timeout_minutes,
        on_end=status.fails,
    )
    with watchdog:
        try:
            yield
        except RemoteRankError as error:
            if "imed out" not in str(error):
                raise
            raise RemoteRankError(f"{error}; in phase {phases.failed_in}: {watchdog.missing()}") from error
