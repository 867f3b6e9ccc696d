"""Threads that nobody waits for: results, errors, order, and an end that does not hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_kd.daemons import DaemonThreads


def test_results_and_errors_come_back() -> None:
    threads = DaemonThreads(3, "few")
    assert threads.map([partial(pow, i, 2) for i in range(50)]) == [i * i for i in range(50)]
    assert threads.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.call(divmod, 1, 0)
    with pytest.raises(SystemExit):
        threads.call(sys.exit, 1)
    with pytest.raises(ZeroDivisionError):
        threads.map([lambda: 1, lambda: 1 // 0, lambda: 2])
    assert threads.call(threading.current_thread).daemon
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("few-")]


def test_calls_run_side_by_side_and_no_more_than_so_many() -> None:
    threads, meeting = DaemonThreads(3, "meet"), threading.Barrier(3, timeout=30)
    assert sorted(threads.map([meeting.wait] * 3)) == [0, 1, 2]
    names = threads.map([lambda: threading.current_thread().name] * 40)
    assert set(names) <= {"meet-0", "meet-1", "meet-2"}


def test_a_call_within_a_call_does_not_wait_for_a_thread() -> None:
    threads = DaemonThreads(1, "one")
    assert threads.submit(lambda: threads.call(lambda: threads.map([lambda: 5]))).result(30) == [5]


def test_one_thread_keeps_the_order() -> None:
    threads, done = DaemonThreads(1, "one"), list[int]()
    futures = [threads.submit(done.append, i) for i in range(100)]
    threads.close(30)
    assert done == list(range(100)) and all(future.done() for future in futures)


def test_closing_gives_up_on_a_call_that_hangs() -> None:
    threads, free = DaemonThreads(1, "hung"), threading.Event()
    threads.submit(free.wait)
    began = time.monotonic()
    threads.close(0.05)
    assert time.monotonic() - began < 10
    free.set()


@pytest.mark.parametrize("waits", ["threads.call(hang)", "threads.map([hang, hang])", "threads.submit(hang)"])
def test_an_interrupt_ends_a_process_that_hangs(tmp_path: Path, waits: str) -> None:
    """A read from a pipe that nobody writes to stands for a disk that does not answer."""
    program = (
        "import os, sys; from megatron_kd.daemons import DaemonThreads\n"
        "threads = DaemonThreads(2, 'x'); ends = os.pipe(); hang = lambda: os.read(ends[0], 1)\n"
        f"print('ready', flush=True); {waits}; sys.exit(5)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    try:
        if "submit" not in waits:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
    assert code == (5 if "submit" in waits else -signal.SIGINT)
