"""Threads that neither Ctrl-C nor the end of the process waits for: for calls that may hang in the system or a library.

``concurrent.futures`` joins its threads when the interpreter ends, however long a disk or a store does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """At most so many threads, started as they are needed."""

    def __init__(self, most: int, name: str) -> None:
        """``name``: of the threads, with a number."""
        self._most, self._name = most, name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit[**P, T](self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Has a call done. A thread's calls are begun in the order in which they were submitted."""
        future: Future[T] = Future()
        self._calls.put((future, partial(do, *args, **kwargs)))
        with self._lock:
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def call[**P, T](self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call's result, or what it raises. Unlike in the call itself, Ctrl-C is heard while this waits for it."""
        if threading.current_thread() in self._threads:  # which must not wait for another of them to be free
            return do(*args, **kwargs)
        return self.submit(do, *args, **kwargs).result()

    def map[T](self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of calls, done side by side; raises what the first of those that fail raises."""
        if threading.current_thread() in self._threads:
            return [call() for call in calls]
        futures = [self.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # those that did not begin

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the threads after the calls that were submitted; waits for that, at most so many seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            future, do = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except BaseException as error:  # whoever waits for the result shall have it
                    future.set_exception(error)
            del task, future, do  # a result must not live until the next call
            self._idle.release()
