"""A harness for tests that need real process groups: ``run_distributed(fn, world_size)``.

Shipped with the package so that others can test what they build on it. ``fn`` must be importable by name (a function
at the top level of a module), since every rank is a fresh process.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PRELOADED = (
    "torch.distributed.checkpoint",
    "transformers",
    "megatron_kd.training.loop",
    "megatron_kd.teacher.capture",
)
"""Imported once, in the process that ranks are forked from: of the start of a rank that is nearly all."""


class RankFailedError(AssertionError):
    """One or more ranks raised; the message holds every traceback, each headed by its rank."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = 120.0
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` in ``world_size`` processes joined in one default process group.

    Every rank has one intra-op thread, and collectives have a timeout, so that a mismatch ends in an error.

    Args:
        fn: a top-level function; its result and ``args`` must be picklable (tensors are).
        backend: ``gloo`` on the CPU, ``nccl`` where each rank has a GPU.
        timeout_s: all ranks are killed after this time.

    Returns:
        The results in rank order.

    Raises:
        RankFailedError: when a rank raised, died or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        here = os.getcwd(), dict(os.environ)  # the server keeps those of its own start
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, backend, timeout_s, folder, here, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            # One failure ends all, a little later: the others may be about to say why.
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                if any(process.exitcode not in (None, 0) for process in ranks):
                    deadline = min(deadline, time.monotonic() + 3.0)
                time.sleep(0.02)
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                _end_helpers(process.pid)
        results, failures = [], []
        for rank, process in enumerate(ranks):
            path = Path(folder) / f"{rank}.pt"
            if path.exists():
                good, value = torch.load(path, weights_only=False)
                if good:
                    results.append(value)
                else:
                    failures.append(f"--- rank {rank} of {world_size} ---\n{value}")
            else:
                how = "was still running" if rank in hung else f"died with exit code {process.exitcode}"
                failures.append(f"--- rank {rank} of {world_size} {how} ---")
        if failures:
            raise RankFailedError("\n".join(failures))
        return results


def _end_helpers(rank_pid: int | None) -> None:
    """Ends what a dead rank left behind: saving a checkpoint starts a process that outlives one that was killed."""
    if rank_pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(rank_pid, signal.SIGKILL)


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    folder: str,
    here: tuple[str, dict[str, str]],
    args: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)  # a process group of its own, by which _end_helpers finds the processes it starts
    os.chdir(here[0])
    os.environ.clear()
    os.environ.update(here[1])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    outcome: tuple[bool, Any]
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        dist.barrier()  # a rank that ended while others still connect would break their connection
        outcome = (True, fn(rank, world_size, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    temporary = Path(folder) / f".{rank}.pt"
    torch.save(outcome, temporary)
    temporary.rename(Path(folder) / f"{rank}.pt")
    if dist.is_initialized() and outcome[0]:
        dist.destroy_process_group()
    if not outcome[0]:
        os._exit(1)  # a rank that failed must not wait in a collective's destructor
