"""Reading ahead in the background, so that a step does not wait for its data."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any


class Prefetcher[K, T]:
    """Calls ``load`` for each key in order, a few ahead of the consumer, in one thread.

    An error in ``load`` is raised by the ``next`` call that wanted that item, not earlier and not in the thread.

    Attributes:
        waited_s: how long the last ``next`` call had to wait.
    """

    def __init__(self, keys: Iterable[K], load: Callable[[K], T], depth: int = 2) -> None:
        """``depth``: items held ready at most."""
        self.waited_s = 0.0
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(iter(keys), load), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, keys: Any, load: Callable[[K], T]) -> None:
        try:
            for key in keys:
                if not self._put(("item", load(key))):
                    return
        except Exception as error:
            self._put(("error", error))
            return
        self._put(("end", None))

    def _put(self, entry: tuple[str, Any]) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(entry, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __next__(self) -> T:
        """The next item. Raises StopIteration behind the last one, or the error that ``load`` raised."""
        started = time.perf_counter()
        kind, value = self._ready.get()
        self.waited_s = time.perf_counter() - started
        if kind == "item":
            item: T = value
            return item
        self._ready.put((kind, value))  # asked again, it says the same
        if kind == "error":
            raise value
        raise StopIteration

    def __iter__(self) -> Prefetcher[K, T]:
        return self

    def close(self) -> None:
        """Stops reading ahead; the thread ends with the item it is at."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher[K, T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
