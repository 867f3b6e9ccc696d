"""The processes that verify shares its work with: they end with their parent, and what ends them early is reported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron_kd.cache.workers import run_tasks
from megatron_kd.errors import CacheError

ROOT = Path(__file__).resolve().parents[2]


def _square(task: int) -> tuple[int, int]:
    time.sleep(0.001 * (task % 5))
    return task * task, os.getpid()


def squares() -> Callable[[int], tuple[int, int]]:
    return _square


@pytest.mark.parametrize("workers", [1, 3])
def test_tasks_and_those_that_follow_are_done_once(workers: int) -> None:
    results: dict[int, int] = {}
    pids = set()

    def done(task: int, result: tuple[int, int]) -> Iterable[int]:
        assert task not in results
        results[task], pid = result
        pids.add(pid)
        return [10 * task, 10 * task + 1] if 0 < task < 100 else []

    run_tasks(iter(range(1, 8)), squares, done, workers)
    wanted = {int(f"{first}{rest}") for first in range(1, 8) for rest in ("", *"01", "00", "01", "10", "11")}
    assert results == {task: task * task for task in wanted}
    assert (os.getpid() in pids) == (workers == 1) and len(pids) <= workers


def test_tasks_that_follow_come_first() -> None:
    order: list[int] = []

    def done(task: int, result: object) -> Iterable[int]:
        order.append(task)
        return [task * 10, task * 10 + 1] if task < 10 else []

    run_tasks([1, 2], squares, done, 1)
    assert order == [1, 10, 11, 2, 20, 21]


def test_processes_are_started_as_work_needs_them() -> None:
    pids = set()

    def done(task: int, result: tuple[int, int]) -> Iterable[int]:
        pids.add(result[1])
        return [task - 1] if task else []

    run_tasks([5], squares, done, 8)
    assert len(pids) == 1
    run_tasks([], squares, done, 8)


def _kill(task: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


def killed() -> Callable[[int], int]:
    return _kill


def _leave(task: int) -> int:
    os._exit(7)


def left() -> Callable[[int], int]:
    return _leave


def _fail(task: int) -> int:
    raise CacheError("as users see it") if task == 1 else KeyError("no such thing")


def failing() -> Callable[[int], int]:
    return _fail


def never_ready() -> Callable[[int], int]:
    raise CacheError("the cache cannot be opened")


@pytest.mark.parametrize(
    ("prepare", "task", "error", "message"),
    [
        (killed, 3, CacheError, "had to do 3 was killed by SIGKILL; if memory ran out, take fewer workers"),
        (left, 0, CacheError, "had to do 0 ended with status 7"),
        (failing, 1, CacheError, "^as users see it$"),
        (failing, 2, RuntimeError, "(?s)2 failed in a worker process:.*KeyError: 'no such thing'"),
        (never_ready, 0, CacheError, "the cache cannot be opened"),
    ],
)
def test_what_ends_a_worker_ends_the_work(
    prepare: Callable[[], Callable[[int], int]], task: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_tasks([task] * 20, prepare, lambda task, result: [], 2)
    assert multiprocessing.active_children() == []


def _sleep(seconds: float) -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: two workers share the pipe
    time.sleep(seconds)


def sleeping() -> Callable[[float], None]:
    return _sleep


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 600), (signal.SIGKILL, 1)])
def test_workers_end_with_their_parent(number: signal.Signals, seconds: int) -> None:
    """Ctrl-C reaches every process of the terminal and ends all at once; a kill reaches the parent alone, workers
    notice when their task is done."""
    program = (
        "from megatron_kd.cache.workers import run_tasks; from tests.unit.test_cache_verify_workers import sleeping; "
        f"run_tasks([{seconds}] * 99, sleeping, lambda task, result: [], 2)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(_alive(pid) for pid in pids)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)
    else:
        os.kill(parent.pid, number)
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_alive, pids))
    _, errors = parent.communicate(timeout=10)
    assert parent.returncode == -number
    assert errors.count("Traceback") == (number == signal.SIGINT), errors


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
