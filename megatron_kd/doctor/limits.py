"""Limits that the system sets to a process: shared memory, open files, locked memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from megatron_kd.doctor.check import Check, fail, not_needed, ok, warn
from megatron_kd.doctor.target import Target

_GIB = 2**30
SHM_BYTES = _GIB
"""nccl maps some tens of MiB of /dev/shm for each pair of ranks; Docker gives 64 MiB in all."""
OPEN_FILES = 4096
"""Each rank keeps shards of the cache open, twenty files a shard, beside its sockets."""


@dataclass(frozen=True)
class Limits:
    """Bytes of /dev/shm (None: there is none), and soft limits; −1 is unlimited."""

    shm_bytes: int | None
    open_files: int
    locked_bytes: int


def read_limits() -> Limits:
    """Those of this process."""
    try:
        status = os.statvfs("/dev/shm")
        shm: int | None = status.f_blocks * status.f_frsize
    except OSError:
        shm = None
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    unlimited = resource.RLIM_INFINITY
    return Limits(shm, -1 if files == unlimited else files, -1 if locked == unlimited else locked)


def check_limits(limits: Limits, target: Target) -> list[Check]:
    """Judges them for one node of the target."""
    return [_shm(limits.shm_bytes, target), _files(limits.open_files), _locked(limits.locked_bytes, target)]


def _shm(size: int | None, target: Target) -> Check:
    if not target.wants_gpu or target.gpus_per_node == 1:
        return not_needed("shared-memory", target.why_cpu if not target.wants_gpu else "one rank on a node")
    if size is None:
        return fail("shared-memory", "there is no /dev/shm, which nccl needs", "mount a tmpfs there")
    found = f"/dev/shm has {size / _GIB:.2f} GiB"
    if size < SHM_BYTES:
        return fail("shared-memory", found, "start the container with --ipc=host or --shm-size=8g")
    return ok("shared-memory", found)


def _files(limit: int) -> Check:
    if limit == -1 or limit >= OPEN_FILES:
        return ok("open-files", "unlimited" if limit == -1 else f"up to {limit}")
    return warn("open-files", f"a process may open {limit} files", f"raise it: ulimit -n {OPEN_FILES} or more")


def _locked(limit: int, target: Target) -> Check:
    if not target.wants_gpu:
        return not_needed("locked-memory", target.why_cpu)
    if limit == -1:
        return ok("locked-memory", "unlimited")
    return warn(
        "locked-memory",
        f"a process may lock {limit / 2**20:.0f} MiB; InfiniBand registers what it sends",
        "ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )
