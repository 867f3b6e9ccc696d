"""Reading ahead in the background, so that a step does not wait for its data."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

_PATIENCE_S = 5.0  # a read that hangs in dead storage must not keep a rank from ending


class Prefetcher[K, T]:
    """Calls ``load`` for each key, a few ahead of the consumer, in threads; items come in the order of the keys.

    An error in ``load`` is raised by the ``next`` call that wanted that item, not earlier and not in the thread.

    Attributes:
        waited_s: how long ``next`` calls had to wait, all of them together.
    """

    def __init__(self, keys: Iterable[K], load: Callable[[K], T], depth: int = 2, workers: int = 1) -> None:
        """Starts reading.

        Args:
            keys: taken in the thread of the consumer, one by one.
            load: called in any of the threads, in several at once.
            depth: items that are ready or being read at most, beside those that were handed out.
            workers: threads, and so reads in flight; more than ``depth`` find nothing to do.
        """
        if depth < 1 or workers < 1:
            raise ValueError(f"depth {depth} and workers {workers} must be at least 1")
        self.waited_s = 0.0
        self._keys = iter(keys)
        self._ahead: deque[Future[T]] = deque()
        self._work: queue.SimpleQueue[tuple[Future[T], K] | None] = queue.SimpleQueue()
        for _ in range(depth):
            self._submit()
        self._threads = [
            threading.Thread(target=self._run, args=(load,), name=f"prefetch-{i}", daemon=True)
            for i in range(min(workers, depth))
        ]
        for thread in self._threads:
            thread.start()

    def _submit(self) -> None:
        try:
            key = next(self._keys)
        except StopIteration:
            return
        future: Future[T] = Future()
        self._ahead.append(future)
        self._work.put((future, key))

    def _run(self, load: Callable[[K], T]) -> None:
        while (entry := self._work.get()) is not None:
            future, key = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(load(key))
            except BaseException as error:  # whatever it is: the consumer would wait for ever
                future.set_exception(error)
            del entry, future  # the consumer alone decides how long an item lives

    def __next__(self) -> T:
        """The next item. Raises StopIteration behind the last one, or the error that ``load`` raised; so it goes on."""
        if not self._ahead:
            raise StopIteration
        started = time.perf_counter()
        try:
            item = self._ahead[0].result()
        finally:
            self.waited_s += time.perf_counter() - started
        self._ahead.popleft()
        self._submit()
        return item

    def __iter__(self) -> Prefetcher[K, T]:
        return self

    def close(self) -> None:
        """Stops reading ahead; each thread ends with the item it is at, which is waited for a few seconds."""
        for future in self._ahead:
            future.cancel()
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def __enter__(self) -> Prefetcher[K, T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
