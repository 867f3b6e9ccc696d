"""A profile of some training steps, for chrome://tracing, Perfetto or Nsight Systems."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from megatron_kd.config import ProfileConfig
from megatron_kd.device import is_cuda, nsys_range, synchronize

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps of one rank that a recipe names. Left, it writes what it has.

    The phases of a step are named ranges of the trace. Where a run ends within the window, by its signal or an error,
    the trace holds the steps so far; the run that goes on writes another one with the steps that are left.
    """

    def __init__(self, settings: ProfileConfig | None, folder: Path, rank: int) -> None:
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder = folder
        self._rank = rank
        self._running = ExitStack()
        self._range = ExitStack()
        self._last: int | None = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._range.close()
        self._running.close()

    def begin(self, iteration: int) -> None:
        """The iteration that begins, counted from 1; what happens until the next belongs to it."""
        settings = self._settings
        if settings is None:
            return
        self._range.close()
        if iteration > settings.step_end:
            self._running.close()
        elif iteration > settings.step_start:
            if self._last is None:
                self._running.enter_context(self._profile(settings, iteration))
            self._last = iteration
            self._range.enter_context(record_function(f"iteration {iteration}"))

    @contextmanager
    def _profile(self, settings: ProfileConfig, first: int) -> Iterator[None]:
        if settings.profiler == "nsys":
            with nsys_range(record_shapes=settings.record_shapes):
                yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda() else [])]
        profiler = profile(
            activities=activities,
            record_shapes=settings.record_shapes,
            with_stack=settings.with_stack,
            profile_memory=settings.profile_memory,
        )
        profiler.start()
        try:
            yield
        finally:
            synchronize()
            profiler.stop()
            self._write(profiler, first)

    def _write(self, profiler: profile, first: int) -> None:
        """A trace that cannot be written is a warning: training goes on without it."""
        path = self._folder / f"iter_{first:07d}_{self._last:07d}_rank_{self._rank}.json.gz"
        partial = path.with_name(f".{path.name}")  # keeps the ending, by which the trace is compressed
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except OSError as error:
            logger.warning("the profile %s could not be written: %s", path, error)
        else:
            logger.info("profiled into %s", path)
