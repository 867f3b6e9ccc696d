"""Checks spread over processes: each works on one task at a time, and what it finds may lead to further tasks.

Processes, because about a third of the work on a row holds the interpreter's lock: threads stop gaining after a few.
They are spawned, never forked: libraries with threads of their own (torch, object stores) do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_kd.errors import CacheError


def run_tasks[T, R](
    tasks: Iterable[T],
    prepare: Callable[[], Callable[[T], R]],
    done: Callable[[T, R], Iterable[T]],
    workers: int,
) -> None:
    """Works through tasks and those that follow from them.

    Args:
        tasks: taken one at a time, when a worker is free.
        prepare: makes the function that does a task, once in each worker; with more than one it must be picklable,
            as must be tasks and results. It may use a module's state: nothing is shared.
        done: called here with each result, in the order in which they arrive; returns further tasks, which go before
            all waiting ones, so that they find the files of their predecessors still in the page cache.
        workers: 1 does everything in this process. Others are started when there is work for them.

    Raises:
        CacheError: a worker died, for instance because memory ran out.
        Exception: whatever a task or ``done`` raises ends all workers at once; so does an interrupt.
    """
    queue = _Queue(tasks)
    if workers <= 1:
        work = prepare()
        for task in queue:
            queue.put_first(done(task, work(task)))
        return
    team: list[_Worker] = []
    try:
        while True:
            for worker in team:
                if worker.task is None and queue:
                    worker.give(next(queue))
            while len(team) < workers and queue:
                team.append(_start(prepare))
                team[-1].give(next(queue))
            busy = [worker for worker in team if worker.task is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe in ready:
                    task, worker.task = worker.task, None
                    queue.put_first(done(task, worker.result_of(task)))
    finally:
        for worker in team:
            worker.process.kill()  # workers only read: nothing is lost
        for worker in team:
            worker.process.join()
            worker.pipe.close()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Queue[T]:
    """An iterator with a front: false where nothing is left."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._front: deque[T] = deque()
        self._rest = iter(tasks)

    def put_first(self, tasks: Iterable[T]) -> None:
        self._front.extendleft(reversed(list(tasks)))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._front.popleft() if self._front else next(self._rest)

    def __bool__(self) -> bool:
        if not self._front:
            for task in self._rest:
                self._front.append(task)
                break
        return bool(self._front)


@dataclass
class _Worker:
    """A process, our end of its pipe, and the task it is busy with."""

    process: BaseProcess
    pipe: Connection
    task: Any = None

    def give(self, task: Any) -> None:
        self.task = task
        try:
            self.pipe.send(task)
        except BrokenPipeError:
            self.result_of(task)

    def result_of(self, task: Any) -> Any:
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            hint = "; if memory ran out, take fewer workers" if code == -signal.SIGKILL else ""
            raise CacheError(f"the worker process that had to do {task} {how}{hint}") from error
        if isinstance(result, Exception):
            raise result
        return result


def _start(prepare: Callable[[], Callable[[Any], Any]]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, prepare), daemon=True)
    with _interrupts_blocked():
        process.start()
    theirs.close()  # the child's death then shows as the end of our pipe
    return _Worker(process, ours)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    # Ctrl-C goes to all processes of a terminal. Workers inherit the mask and leave it to us, who then kill them.
    resource_tracker.ensure_running()  # it would unblock the signal when it starts with the first worker
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Does tasks until the other end of the pipe closes, by intention or because that process died."""
    work = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            work = work or prepare()
            answer = work(task)
        except CacheError as error:
            answer = error
        except Exception:
            # Not every exception can be pickled, and none takes its traceback along.
            answer = RuntimeError(f"{task} failed in a worker process:\n{traceback.format_exc()}")
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return
