"""One process after another: on as many ranks as a recipe asks for, with signals passed on to the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

AGAIN_S = 5.0
"""A signal can be lost while a rank starts, so it is sent until all are gone."""


class Job(Protocol):
    """A command that runs."""

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None where it still runs after the timeout."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to its ranks."""


Start = Callable[[Sequence[str], int], Job]
"""Starts ``megatron-kd WORDS`` on so many ranks of this machine."""


class Process:
    """``megatron-kd`` in a session of its own, so that the terminal's Ctrl-C does not reach it; under torchrun where it
    needs several ranks. What it prints goes to standard error."""

    def __init__(self, words: Sequence[str], ranks: int) -> None:
        program = ["-m", "megatron_kd", *words]
        if ranks > 1:
            program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
        self._torchrun = ranks > 1
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            # Until a rank has its own handler, a signal to stop must not end it.
            preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        )

    def wait(self, timeout_s: float) -> int | None:
        """As ``Job.wait``; negative: the signal that ended it."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: signal.Signals) -> None:
        """To the ranks; torchrun itself would die of USR1, and kill its ranks after SIGTERM."""
        for pid in self._ranks() if number != signal.SIGKILL else [*self._ranks(), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ranks(self) -> list[int]:
        pid = self._process.pid
        if not self._torchrun:
            return [pid] if self._process.poll() is None else []
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []


class Relay:
    """While entered, SIGTERM, SIGUSR1, a closed terminal and Ctrl-C stop what runs; a second Ctrl-C ends it at once.

    Attributes:
        received: the name of the first signal, or None.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

    def __init__(self, start: Start) -> None:
        self._start = start
        self.received: str | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, object] = {}

    def run(self, words: Sequence[str], ranks: int, *, saves: bool) -> int:
        """Runs a command to its end.

        Args:
            saves: it keeps what is done at SIGUSR1, and leaves with status 0; others are ended by SIGTERM.

        Returns:
            Its exit status.
        """
        job = self._start(words, ranks)
        asked = -AGAIN_S
        while (status := job.wait(0.1)) is None:
            if self._interrupts > 1:
                job.send(signal.SIGKILL)
            elif self.received is not None and time.monotonic() - asked >= AGAIN_S:
                asked = time.monotonic()
                job.send(signal.SIGUSR1 if saves else signal.SIGTERM)
        return status

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self.received is None:
            self.received = signal.Signals(number).name
            print("megatron-kd: stopping what runs; Ctrl-C once more ends it at once", file=sys.stderr, flush=True)

    def __enter__(self) -> Relay:
        for number in self._SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
