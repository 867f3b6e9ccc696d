"""Publishing files: nothing half-written ever stands under a final name."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable (POSIX needs a sync of the directory itself)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk does not say which file it refused
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Writes a whole file under its final name, replacing what was there. Raises OSError as the system reports it."""
    path = Path(path)
    temporary = _write_temporary(path, data.encode() if isinstance(data, str) else data)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def create_only(path: Path | str, data: bytes | str) -> bool:
    """Publishes a file unless one of that name exists; exactly one of many racing callers gets True.

    Either way the name is durable on return: what a caller does because another was first must not outlive that name.
    """
    path = Path(path)
    temporary = _write_temporary(path, data.encode() if isinstance(data, str) else data)
    created = True
    try:
        os.link(temporary, path)
    except FileExistsError:
        created = False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return created


def write_json(path: Path | str, value: Any) -> None:
    """``write_atomic`` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
