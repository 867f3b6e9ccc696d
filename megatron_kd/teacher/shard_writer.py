"""Shards are written in a thread of their own while the next rows are scored.

Compression, hashes and syncs let go of the interpreter, so that the accelerator need not wait for them. A few rows at
most are in memory between the two, however large a shard is, and the end of one shard is written while the next is
scored already.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType

from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.daemons import DaemonThreads

WAITING_ROWS = 4
"""Rows between scoring and writing; the queue of a shard takes as many, or a micro batch."""


INTERRUPTED_WAIT_S = 2.0
"""For the end of what is written while the process is told to end at once: a disk may not answer any more."""


class _AbandonedError(Exception):
    """Ends the writing of a shard whose rows will not all come."""


class RowQueue:
    """A bounded queue of one shard's rows. Whichever end gives up, the other never waits for it."""

    def __init__(self, room: int) -> None:
        """``room``: rows that may wait."""
        self._room = room
        self._rows: deque[Row] = deque()
        self._changed = threading.Condition()
        self._ended = self._abandoned = self._unread = False

    def put(self, row: Row) -> None:
        """Waits for room. Once nobody reads any more the row is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._rows) < self._room or self._unread)
            if not self._unread:
                self._rows.append(row)
                self._changed.notify_all()

    def end(self) -> None:
        """No row follows."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """The rows so far are worth nothing: reading raises."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def leave(self) -> None:
        """Nobody reads any more."""
        with self._changed:
            self._unread = True
            self._rows.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Row]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._ended or self._abandoned)
                if self._abandoned:
                    raise _AbandonedError
                if not self._rows:
                    return
                row = self._rows.popleft()
                self._changed.notify_all()
            yield row


class ShardWriter:
    """``begin`` a shard, ``put`` its rows, ``end`` it, ``check`` now and then, and ``finish``.

    Left before that, it commits the shards that ended and takes away what there is of the one that did not. Only where
    an interrupt leaves it, there is no more than a moment for that.

    Attributes:
        committed: the shards that this writer committed; those that another job was first with are not among them.
    """

    def __init__(self, cache: Cache, room: int = WAITING_ROWS) -> None:
        """``room``: rows that may wait for the writing thread."""
        self.committed: list[int] = []
        self._cache = cache
        self._room = room
        self._thread = DaemonThreads(1, "shard-writer")
        self._writes: list[Future[None]] = []
        self._queue: RowQueue | None = None

    def begin(self, shard_index: int) -> None:
        """The rows that are put from now on are those of this shard. It is written once the one before is."""
        assert self._queue is None, "the shard before has not ended"
        self._queue = RowQueue(self._room)
        self._writes.append(self._thread.submit(self._write, shard_index, self._queue))

    def put(self, row: Row) -> None:
        """Waits while ``room`` rows wait. Never fails: ``check`` says what went wrong."""
        assert self._queue is not None, "no shard was begun"
        self._queue.put(row)

    def end(self) -> None:
        """All rows of the shard were put."""
        assert self._queue is not None, "no shard was begun"
        self._queue.end()
        self._queue = None

    def abandon(self) -> None:
        """Gives up the shard that was begun and has not ended, if there is one; nothing of it stays."""
        if self._queue is not None:
            self._queue.abandon()
            self._queue = None
            del self._writes[-1:]  # the last one is its own, unless it failed and ``check`` said so

    def check(self) -> None:
        """Raises what the writing thread met, such as the CacheError of a full disk. Does not wait."""
        for write in [write for write in self._writes if write.done()]:
            self._writes.remove(write)
            write.result()

    def finish(self) -> None:
        """Waits until all shards that ended are committed. Raises what the writing thread met."""
        assert self._queue is None, "the last shard has not ended"
        for write in self._writes:
            write.result()
        self._writes.clear()

    def _write(self, shard_index: int, rows: RowQueue) -> None:
        try:
            if write_shard(self._cache, shard_index, rows):
                self.committed.append(shard_index)
        finally:
            rows.leave()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()
        told_to_end = kind is not None and not issubclass(kind, Exception)
        self._thread.close(INTERRUPTED_WAIT_S if told_to_end else None)
