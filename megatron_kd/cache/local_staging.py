"""Local folders in which shards are written before they are uploaded, and what killed processes left of them.

Nobody can tidy up after SIGKILL but whoever comes next. A folder is locked as long as its process lives (flock, which
ends with the process), so that one whose lock is free was left behind.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# Of this host only: where several share TMPDIR, some file systems keep locks to the host that took them.
_PREFIX = f"megatron-kd-staging-{platform.node()}-"
_NEW_S = 60.0  # a folder is not yet locked in the moment after it was made
_held: dict[Path, int] = {}


def make_staging(name: str) -> Path:
    """A new folder under ``TMPDIR``. Before, removes those of this user's processes here that are no more."""
    for folder in Path(tempfile.gettempdir()).iterdir():
        if folder.name.startswith(_PREFIX):
            _remove_if_abandoned(folder)
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
    descriptor = _locked(path)
    if descriptor is not None:
        _held[path] = descriptor
    return path


def remove_staging(path: Path) -> None:
    """Removes a folder that ``make_staging`` made, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def _remove_if_abandoned(folder: Path) -> None:
    if folder in _held:
        return  # not everywhere is a lock an obstacle to the process that holds it
    with suppress(OSError):  # another user's, or gone meanwhile
        if folder.is_symlink() or time.time() - folder.stat().st_mtime < _NEW_S:
            return
        descriptor = _locked(folder)
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another process does, or the system cannot lock it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
