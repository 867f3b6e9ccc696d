"""The process groups of a run, tried: sums, a ring of neighbours, and what the links between them carry."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.device import current_device, init_distributed, is_cuda, synchronize
from megatron_kd.doctor.roll_call import Meeting
from megatron_kd.errors import RemoteRankError

ALL_REDUCE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
RING_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_ROUNDS = 3


def open_groups(meeting: Meeting) -> None:
    """The default group over nccl or gloo, and the gloo group beside it. Collective; raises RuntimeError."""
    timeout = timedelta(seconds=meeting.timeout)
    options: dict[str, Any] = {"device_id": current_device()} if is_cuda() else {}
    dist.init_process_group(
        "nccl" if is_cuda() else "gloo",
        store=dist.PrefixStore("groups", meeting.store),
        rank=meeting.rank,
        world_size=meeting.world,
        timeout=timeout,
        **options,
    )
    init_distributed(timeout)


def measure_exchange(*, small: bool = False) -> dict[str, float]:
    """GiB/s of an all_reduce (what each link carries: 2(n − 1)/n of the bytes) and of a ring of sends. Collective.

    Args:
        small: send little, for the sake of time: the figures then measure how long a message takes.

    Raises:
        RemoteRankError: what arrived is not what was sent.
        RuntimeError: the backend's own.
    """
    kind, part = current_device().type, 64 if small else 1
    rates = {
        "all_reduce": _all_reduce(ALL_REDUCE_BYTES[kind] // 4 // part),
        "ring": _ring(RING_BYTES[kind] // 4 // part),
    }
    # The slowest rank's figures are those of the job.
    slowest = torch.tensor(list(rates.values()), device=current_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return dict(zip(rates, slowest.tolist(), strict=True))


def _all_reduce(numbers: int) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first sets up the connections
        sent = torch.full((numbers,), rank + 1.0, device=current_device())
        seconds = _timed(lambda sent=sent: dist.all_reduce(sent))
        best = min(best, seconds)
        if not bool((sent == world * (world + 1) / 2).all()):
            raise RemoteRankError(f"rank {rank} got a wrong sum of all ranks from all_reduce")
    return 4 * numbers * 2 * (world - 1) / world / best / 2**30


def _ring(numbers: int) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % world, (rank + 1) % world
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        sent = torch.full((numbers,), float(rank), device=current_device())
        got = torch.full_like(sent, -1.0)

        def pass_on(sent: torch.Tensor = sent, got: torch.Tensor = got) -> None:
            sends = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]
            for work in dist.batch_isend_irecv(sends):
                work.wait()

        best = min(best, _timed(pass_on))
        if not bool((got == before).all()):
            raise RemoteRankError(f"rank {rank} did not get from rank {before} what that sent")
    return 4 * numbers / best / 2**30


def _timed(do: Any) -> float:
    synchronize()
    start = time.perf_counter()
    do()
    synchronize()
    return time.perf_counter() - start
