"""SIGTERM, SIGUSR1 and Ctrl-C: finish the step, keep what is done, leave with status 0."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopOnSignal:
    """While entered, the signals only set a flag; the loop asks for it where all ranks can agree.

    A second Ctrl-C ends the process at once.

    Attributes:
        received: the name of the first signal, or None.
    """

    def __init__(self, on_interrupt: str = "saving after this step") -> None:
        """``on_interrupt``: what is said to a person who pressed Ctrl-C."""
        self._on_interrupt = on_interrupt
        self.received: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            if number == signal.SIGINT:
                print(f"\nmegatron-kd: {self._on_interrupt}; Ctrl-C once more ends at once", file=sys.stderr)

    def __enter__(self) -> StopOnSignal:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
