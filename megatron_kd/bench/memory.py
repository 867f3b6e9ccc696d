"""Running out of memory as a result: noticed in time, told from other errors, and cleaned up after."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_kd.device.out_of_memory import is_out_of_memory
from megatron_kd.device.platform import CPU_NAME

__all__ = ["bounded_host_memory", "free_host_bytes", "is_out_of_memory", "pool_growths", "release_memory"]

# Of the memory that is free at the start, the share that is left to other processes.
_RESERVE = 0.1


def release_memory(place: torch.device) -> None:
    """Gives what a failed or finished pass held back to the device, so that the next one finds it whole."""
    gc.collect()
    if place.type != CPU_NAME:
        torch.accelerator.empty_cache()


def pool_growths(place: torch.device) -> int:
    """How often the device's allocator has fetched memory from the driver so far; 0 on a CPU."""
    if place.type == CPU_NAME:
        return 0
    return int(torch.accelerator.memory_stats(place).get("num_device_alloc", 0))


def free_host_bytes() -> int | None:
    """Memory that this process could still take: of the machine and of its cgroup (v2). None where /proc is not."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        if limit != "max":
            free = min(free, int(limit) - used + int(cached.get("inactive_file", 0)))
    except OSError:  # no cgroup of that kind
        pass
    return max(free, 0)


@contextmanager
def bounded_host_memory(spare: int | None = None) -> Iterator[None]:
    """Lets an allocation beyond what is free fail as an error, where Linux would otherwise kill the process later.

    Args:
        spare: bytes that may be taken in the block; by default what is free, less a tenth.
    """
    if spare is None:
        free = free_host_bytes()
        spare = None if free is None else int((1 - _RESERVE) * free)
    if spare is None:
        yield
        return
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, hard, taken + spare) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
