"""Joining the ranks of a job: rendezvous from the environment that torchrun sets, and failing together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.device.platform import current_device, is_cuda
from megatron_kd.errors import RemoteRankError

DEFAULT_TIMEOUT = timedelta(minutes=10)


def init_distributed(timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Joins the default process group: nccl on CUDA, gloo on the CPU. A process started alone joins itself.

    Every collective ends in an error after ``timeout``: a lost rank must never hang the others for ever.
    """
    if dist.is_initialized():
        return
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
    values = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=current_device())
    try:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return [bool(value) for value in values.tolist()]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RemoteRankError(f"a rank of this job died or no longer answers; look at its log ({reason})") from error


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
        raise RemoteRankError(f"{what} failed on another rank; its message says why")
