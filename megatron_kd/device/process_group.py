"""Joining the ranks of a job: rendezvous from the environment that torchrun sets, and failing together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_kd.device.platform import current_device, is_cuda
from megatron_kd.errors import KDError, RemoteRankError

DEFAULT_TIMEOUT = timedelta(minutes=10)
_STILL_WORKING_S = 2.0
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group, and a gloo group of the same ranks for the words that they exchange."""


def init_distributed(timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Joins the default process group: nccl on CUDA, gloo on the CPU. A process started alone joins itself.

    Every collective ends in an error after ``timeout``: a lost rank must never hang the others for ever. The words that
    ranks exchange here (failures, answers, sums) go over a gloo group of their own on every device: there the death of
    a rank is an error at once, which nccl's watchdog would turn into the end of the process after the timeout, and a
    device that has failed cannot keep its rank from saying so. Collective.
    """
    global _control
    if not dist.is_initialized():
        _init_default_group(timeout)
    if _control is None or _control[0] is not dist.group.WORLD:
        _control = cast(dist.ProcessGroup, dist.group.WORLD), dist.new_group(backend="gloo", timeout=timeout)


def _init_default_group(timeout: timedelta) -> None:
    backend = "nccl" if is_cuda() else "gloo"
    options: dict[str, Any] = {"timeout": timeout}
    if is_cuda():
        options["device_id"] = current_device()
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, **options)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)


def destroy_distributed() -> None:
    """Leaves the default process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _exchange(group: dist.ProcessGroup | None = None) -> tuple[dist.ProcessGroup | None, torch.device]:
    """The group to exchange words in, and where their tensors lie. None is all ranks."""
    if group is None and _control is not None and _control[0] is dist.group.WORLD:
        return _control[1], torch.device("cpu")
    return group, current_device()  # a default group that another program has made


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag is set on any rank of the group; see ``on_any_rank``."""
    return on_any_rank([flag], group)[0]


def on_any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[bool]:
    """Which of the flags are set on any rank of the group. One all_reduce(MAX).

    Raises:
        RemoteRankError: a rank died or did not answer in time.
    """
    if not dist.is_initialized():
        return list(flags)
    group, device = _exchange(group)
    values = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    try:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return [bool(value) for value in values.tolist()]
    except RuntimeError as error:
        raise _lost_rank(error) from error


@contextmanager
def fail_together(what: str) -> Iterator[None]:
    """Runs a block that only some ranks may fail in (reading a file, writing to a full disk); then all fail or none.

    The block itself must hold no collective. Collective: one all_reduce when it ends.

    Raises:
        Exception: this rank's own error, of whatever kind: one that were let through here would leave the others
            waiting for this rank until the timeout.
        RemoteRankError: this rank was fine, another was not.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if error is not None:
        try:
            any_rank(True)
        except RemoteRankError as dead:
            raise error from dead
        raise error
    failed = any_rank(False)
    if failed:
        raise RemoteRankError(failed_elsewhere(what))


def failed_elsewhere(what: str) -> str:
    """The message of a rank that was fine itself."""
    return f"{what} failed on another rank; its message says why"


@contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """Around collectives: one that a dead rank broke raises a RemoteRankError instead of the backend's error."""
    try:
        yield
    except KDError:
        raise  # it says already what happened, perhaps in Gloo's words
    except RuntimeError as error:
        # Gloo has no error class of its own, and running out of memory is a RuntimeError as well.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise _lost_rank(error) from error


def _lost_rank(error: RuntimeError) -> RemoteRankError:
    reason = str(error).splitlines()[0]
    return RemoteRankError(f"a rank of this job died or no longer answers; look at its log ({reason})")


def first_rank_tells[T](what: str, ask: Callable[[], T]) -> T:
    """What the first rank finds out, on all ranks, so that none goes by what it would have seen itself. Collective.

    The others hear every few seconds that it is still at work: it may take longer than a collective may wait.

    Args:
        what: what is done, for the message on the other ranks: ``… failed on another rank``.
        ask: called on the first rank only, where there are several in a thread; holds no collective. Its result is
            pickled.

    Raises:
        BaseException: on the first rank, what ``ask`` raised, of whatever kind.
        RemoteRankError: on the others in that case, or where a rank died.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ask()
    asked: Future[T] = Future()
    is_first = dist.get_rank() == 0
    if is_first:
        # A daemon: Ctrl-C must not wait for it.
        threading.Thread(target=_answer, args=(asked, ask), name=what, daemon=True).start()
    answered = failed = False
    while not answered:
        if is_first:
            wait([asked], _STILL_WORKING_S)
        done = asked.done()
        answered, failed = on_any_rank([done, done and asked.exception() is not None])
    if failed and not is_first:
        raise RemoteRankError(failed_elsewhere(what))
    answer = [asked.result() if is_first else None]
    with lost_ranks_reported():
        group, device = _exchange()
        dist.broadcast_object_list(answer, src=0, group=group, device=device)
    return cast(T, answer[0])


def _answer[T](asked: Future[T], ask: Callable[[], T]) -> None:
    try:
        asked.set_result(ask())
    except BaseException as error:  # let through, it would end this thread and leave all ranks waiting for an answer
        asked.set_exception(error)


def first_message(message: str | None) -> str | None:
    """The message of the first rank that has one, on all ranks; None where none has. Collective over all ranks.

    Raises:
        RemoteRankError: a rank died or did not answer in time.
    """
    if not any_rank(message is not None):
        return None
    said = gather_arrays(np.frombuffer((message or "").encode(), np.uint8))
    return next(text.tobytes().decode() for text in said if len(text))


def sum_over_ranks(values: Sequence[int]) -> list[int]:
    """Adds up integers below 2^63 over all ranks. Collective.

    Raises:
        RemoteRankError: a rank died or did not answer in time.
    """
    if not dist.is_initialized():
        return list(values)
    group, device = _exchange()
    total = torch.tensor(list(values), dtype=torch.int64, device=device)
    with lost_ranks_reported():
        dist.all_reduce(total, group=group)
        return [int(value) for value in total.tolist()]


def gather_arrays[T: np.generic](values: NDArray[T]) -> list[NDArray[T]]:
    """The arrays [n] of all ranks, in their order; each may have its own length. Collective over all ranks.

    Args:
        values: of the same dtype on every rank.

    Raises:
        RemoteRankError: a rank died or did not answer in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [values]
    group, device = _exchange()
    ours = torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy()).to(device)
    with lost_ranks_reported():
        sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=ours.device)
        sizes[dist.get_rank()] = len(ours)
        dist.all_reduce(sizes, group=group)
        longest = int(sizes.max())
        gathered = [ours.new_empty(longest) for _ in sizes]
        dist.all_gather(gathered, torch.nn.functional.pad(ours, (0, longest - len(ours))), group=group)
        return [
            np.frombuffer(part[:size].cpu().numpy().tobytes(), values.dtype)
            for part, size in zip(gathered, sizes.tolist(), strict=True)
        ]
