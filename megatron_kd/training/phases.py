"""What a rank is doing just now, by name: data, forward_backward, optimizer, checkpoint, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

OUTSIDE = "other"
"""What ``current`` is outside of all phases."""


class Phases:
    """The phases of one rank. A phase within another interrupts it.

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

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Is in a phase while entered."""
        before, self.current = self.current, name
        self.beat()
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.current = before
            self.beat()

    def beat(self) -> None:
        """Something got done within a phase: a micro batch, a batch of an evaluation."""
        self.last_beat = time.monotonic()
