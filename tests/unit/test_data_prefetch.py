"""Reading ahead: order, errors where they belong, an end that leaves no thread."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_kd.data.prefetch import Prefetcher


def test_items_come_in_order_and_end() -> None:
    with Prefetcher(range(20), lambda i: i * i) as items:
        assert list(items) == [i * i for i in range(20)]
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_is_raised_by_the_item_that_caused_it() -> None:
    def load(i: int) -> int:
        if i == 3:
            raise OSError("row 3")
        return i

    with Prefetcher(range(10), load) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):  # and by every call after it
            with pytest.raises(OSError, match="row 3"):
                next(items)


def test_it_reads_ahead_by_no_more_than_its_depth() -> None:
    loaded: list[int] = []
    with Prefetcher(range(100), lambda i: loaded.append(i) or i, depth=2) as items:  # type: ignore[func-returns-value]
        assert next(items) == 0
        deadline = time.monotonic() + 10
        while len(loaded) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert loaded == [0, 1, 2, 3]  # one taken, two ready, one waiting for room


def test_closing_in_the_middle_ends_the_thread() -> None:
    before = threading.active_count()
    items = Prefetcher(range(1000), lambda i: i)
    next(items)
    items.close()
    assert threading.active_count() == before
