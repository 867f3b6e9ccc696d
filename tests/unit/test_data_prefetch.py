"""Reading ahead: order, errors where they belong, reads in flight, an end that leaves no thread."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_kd.data.prefetch import Prefetcher

WORKERS = [1, 3]


@pytest.mark.parametrize("workers", WORKERS)
def test_items_come_in_order_and_end(workers: int) -> None:
    def load(i: int) -> int:
        time.sleep(0.004 * (i % 3 == 0))  # every third is late, its successors are ready before it
        return i * i

    with Prefetcher(range(20), load, depth=5, workers=workers) as items:
        assert list(items) == [i * i for i in range(20)]
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_is_raised_by_the_item_that_caused_it(workers: int) -> None:
    def load(i: int) -> int:
        if i == 3:
            raise OSError("row 3")
        time.sleep(0.01)  # the error is there first
        return i

    with Prefetcher(range(10), load, depth=4, workers=workers) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):  # and by every call after it
            with pytest.raises(OSError, match="row 3"):
                next(items)


@pytest.mark.parametrize("workers", WORKERS)
def test_it_reads_ahead_by_no_more_than_its_depth(workers: int) -> None:
    loaded: list[int] = []
    with Prefetcher(range(100), loaded.append, depth=3, workers=workers) as items:
        next(items)
        deadline = time.monotonic() + 10
        while len(loaded) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert sorted(loaded) == [0, 1, 2, 3]  # one handed out, three ahead


def test_as_many_reads_are_in_flight_as_there_are_workers() -> None:
    together = threading.Barrier(3, timeout=10)  # each load returns once two others run beside it
    with Prefetcher(range(6), lambda i: together.wait() >= 0, depth=6, workers=3) as items:
        assert list(items) == [True] * 6


def test_slow_reads_are_waited_for_once_and_not_one_after_the_other() -> None:
    def load(i: int) -> int:
        time.sleep(0.1)
        return i

    started = time.monotonic()
    with Prefetcher(range(8), load, depth=8, workers=8) as items:
        assert list(items) == list(range(8))
    assert time.monotonic() - started < 0.6
    assert 0.05 < items.waited_s < 0.6
    before = items.waited_s
    with Prefetcher(range(1), load) as ready:
        time.sleep(0.3)
        next(ready)
    assert ready.waited_s < 0.05 and items.waited_s == before


@pytest.mark.parametrize("workers", WORKERS)
def test_closing_in_the_middle_ends_the_threads(workers: int) -> None:
    before = threading.active_count()
    items = Prefetcher(range(1000), lambda i: i, depth=4, workers=workers)
    assert threading.active_count() == before + workers
    next(items)
    items.close()
    assert threading.active_count() == before


def test_an_error_ends_the_block_without_waiting_for_what_was_ahead() -> None:
    loaded: list[int] = []

    def load(i: int) -> int:
        loaded.append(i)
        time.sleep(0.02)
        return i

    with pytest.raises(KeyError), Prefetcher(range(1000), load, depth=500) as items:
        raise KeyError(next(items))
    assert len(loaded) < 10


def test_sizes_that_read_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="depth 0"):
        Prefetcher(range(3), str, depth=0)
    with pytest.raises(ValueError, match="workers 0"):
        Prefetcher(range(3), str, workers=0)
