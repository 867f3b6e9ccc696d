"""The disks that a run writes to: speed, room, locks and links."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.doctor.check import Check, fail, ok, warn

_MIB = 2**20
_GIB = 2**30
PROBE_BYTES = 64 * _MIB
SLOW_MIB_S = 50.0
FEW_FILES = 10_000
"""A shard of the cache has some twenty files, a checkpoint one a rank."""


@dataclass(frozen=True)
class DiskSpeed:
    """MiB/s of a file written and synced, and of the same read back."""

    write: float
    read: float


@contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """A name in ``folder`` that nobody has; what stands there is removed."""
    path = folder / f".megatron-kd-doctor.{uuid.uuid4().hex}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def measure_disk(folder: Path, size: int = PROBE_BYTES) -> DiskSpeed:
    """Writes, syncs and reads ``size`` bytes in a folder. Raises OSError as the system does.

    The pages are dropped between, as far as the system does it when asked: a network file system may still answer
    from memory.
    """
    block = os.urandom(_MIB)
    with temporary_file(folder) as path:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            start = time.perf_counter()
            for _ in range(size // _MIB):
                os.write(descriptor, block)
            os.fsync(descriptor)
            write = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            start = time.perf_counter()
            got = 0
            while part := os.read(descriptor, _MIB):
                if part != block[: len(part)]:
                    raise OSError(0, "the file does not hold what was written", str(folder))
                got += len(part)
            read = time.perf_counter() - start
        finally:
            os.close(descriptor)
    if got != size:
        raise OSError(0, f"{size} bytes were written, {got} read back", str(folder))
    return DiskSpeed(size / _MIB / write, size / _MIB / read)


def check_speed(folder: Path, size: int = PROBE_BYTES) -> Check:
    """Judges ``measure_disk``; its OSError is the caller's."""
    speed = measure_disk(folder, size)
    found = f"{folder}: writes {speed.write:.0f} MiB/s, reads {speed.read:.0f} MiB/s"
    if min(speed.write, speed.read) < SLOW_MIB_S:
        return warn("disk-speed", found, "checkpoints and cache wait for it: choose a faster run_dir or teacher.cache")
    return ok("disk-speed", found)


def check_space(folder: Path, needed: int, what: str) -> Check:
    """Free bytes and files in a folder against what will be written there.

    Args:
        what: is to be written, for the message.
    """
    free = shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    found = f"{folder}: {free / _GIB:.1f} GiB free, {what} up to {needed / _GIB:.2f} GiB"
    if free < needed:
        return fail("disk-space", found, "free some space, lower checkpoint.keep, or choose another folder")
    # Some file systems have no fixed number of files, and say 0.
    if status.f_files and status.f_favail < FEW_FILES:
        return fail("disk-space", f"{folder}: room for {status.f_favail} files", "free some inodes, or move the folder")
    if free < 2 * needed:
        return warn("disk-space", found, "that is less than twice as much: keep an eye on it")
    return ok("disk-space", found)


def check_locks(folder: Path) -> Check:
    """Whether a second holder of a lock is refused, and whether files can be linked."""
    with temporary_file(folder) as path:
        with open(path, "x") as first, open(path) as second:
            try:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return warn(
                    "file-locks",
                    f"{folder}: no locks ({error.strerror})",
                    "see to it yourself that one training uses a run_dir",
                )
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return warn(
                    "file-locks",
                    f"{folder}: two holders got one lock",
                    "see to it yourself that one training uses a run_dir",
                )
        with temporary_file(folder) as link:
            try:
                os.link(path, link)
            except OSError as error:
                return fail(
                    "file-locks",
                    f"{folder}: no hard links ({error.strerror})",
                    "the cache publishes its files by linking them: choose another teacher.cache",
                )
    return ok("file-locks", f"{folder}: locks and links work")
