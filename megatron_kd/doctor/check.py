"""One finding, and how a check that fails or hangs becomes one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from megatron_kd.console import describe_os_error
from megatron_kd.device import current_device, is_cuda

Status = Literal["ok", "warn", "fail"]
NOT_NEEDED = "not needed here"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: of the check, the same on every node and in every run; docs/doctor.md lists them.
        status: ``fail`` stops a run or spoils it, ``warn`` may slow it down or concerns a later step.
        found: what is there, in a few words.
        todo: what to do about it; empty where nothing is to be done.
        node: where it was found; empty for what concerns the whole job.
    """

    name: str
    status: Status
    found: str
    todo: str = ""
    node: str = ""

    def on(self, node: str) -> Check:
        """The same finding, of a node."""
        return replace(self, node=node)

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, "ok", found)


def warn(name: str, found: str, todo: str) -> Check:
    """A run works, but may be slow or lose something."""
    return Check(name, "warn", found, todo)


def fail(name: str, found: str, todo: str) -> Check:
    """A run would not start, or not do what it should."""
    return Check(name, "fail", found, todo)


def not_needed(name: str, why: str) -> Check:
    """Something that is not there and that nobody misses."""
    return Check(name, "ok", f"{NOT_NEEDED}: {why}")


class NoAnswerError(Exception):
    """A call did not return in time."""


def within[T](seconds: float, do: Callable[[], T]) -> T:
    """What ``do`` returns, called in a thread that nobody waits for longer than ``seconds``.

    A network file system or a collective that hangs cannot be interrupted; it is left behind.

    Raises:
        NoAnswerError: it has not returned.
        Exception: what it raised.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        # The chosen CUDA device belongs to the thread that chose it.
        with torch.accelerator.device_index(current_device().index) if is_cuda() else nullcontext():
            try:
                outcome.set_result(do())
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeoutError as error:
        if outcome.done():  # the call itself raised a TimeoutError
            raise
        raise NoAnswerError(f"no answer in {seconds:.0f} s") from error


def attempt(name: str, todo: str, seconds: float, do: Callable[[], Check | Sequence[Check]]) -> list[Check]:
    """The findings of ``do``; where it raises or hangs, one failure with the error's own words.

    Args:
        todo: what helps against anything that may be raised.
    """
    try:
        found = within(seconds, do)
    except NoAnswerError as error:
        return [fail(name, str(error), f"the file system or network behind it may hang; {todo}")]
    except Exception as error:
        return [fail(name, in_words(error), todo)]
    return [found] if isinstance(found, Check) else list(found)


def in_words(error: BaseException) -> str:
    """An error as one line."""
    text: Any = describe_os_error(error) if isinstance(error, OSError) else str(error)
    return " ".join(str(text).split()) or type(error).__name__
