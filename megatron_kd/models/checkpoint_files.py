"""What can be known about the files of a ``torch_dist`` checkpoint before any rank enters a collective to load them."""

from __future__ import annotations

import json
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_kd.errors import CheckpointError


def check_files(path: Path) -> None:
    """Checks format, metadata and the length of every data file. No collective; reads no tensor.

    A rank that fails alone inside a distributed load leaves the others waiting, so that each looks here first.

    Raises:
        CheckpointError: naming the file that is missing, unreadable or too short.
    """
    _check_format(path / "metadata.json")
    try:
        stored = FileSystemReader(path).read_metadata().storage_data
        needed: dict[str, int] = {}
        for part in stored.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is damaged: it has no .metadata") from None
    except Exception as error:  # a pickle of anything: there is no end to what it may raise
        raise CheckpointError(f"{path} is damaged: .metadata is unreadable ({one_line(error)})") from error
    for name, length in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size < length:
            raise CheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes of {length}")


def _check_format(file: Path) -> None:
    try:
        backend = json.loads(file.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is damaged: it has no {file.name}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file.parent} is damaged: {file.name} is unreadable ({one_line(error)})") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{file.parent} is a checkpoint of kind {backend!r}, this version reads torch_dist")


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an error says in one line, with its type where it says nothing.

    The first line, but of torch's report of all ranks the last, which has the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1 if isinstance(error, CheckpointException) else 0][:limit]
