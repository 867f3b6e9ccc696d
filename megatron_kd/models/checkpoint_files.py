"""What can be known about the files of a ``torch_dist`` checkpoint before any rank enters a collective to load them.

torch checks no sums: a byte that has flipped on the disk loads as another weight. So each checkpoint keeps, in its
note, the hashes of its files, block by block, and every load compares them, the blocks spread over the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_kd.errors import CheckpointError, DamagedCheckpointError

BLOCK_BYTES = 256 * 2**20
_READ_BYTES = 4 * 2**20


METADATA = ".metadata"
"""torch's index of a checkpoint: a pickle."""


def check_files(path: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Checks format, metadata and the length of every data file. No collective; reads no tensor.

    A rank that fails alone inside a distributed load leaves the others waiting, so that each looks here first. What is
    unpickled is compared with its hash before.

    Args:
        files: what ``describe_files`` said of them when they were written; of an earlier version nothing.

    Raises:
        DamagedCheckpointError: naming the file that is missing, unreadable or too short.
    """
    _check_format(path / "metadata.json")
    check_content(path, {name: told for name, told in files.items() if name == METADATA})
    try:
        stored = FileSystemReader(path).read_metadata().storage_data
        needed: dict[str, int] = {}
        for part in stored.values():
            needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is damaged: it has no {METADATA}") from None
    except Exception as error:  # a pickle of anything: there is no end to what it may raise
        raise DamagedCheckpointError(f"{path} is damaged: {METADATA} is unreadable ({one_line(error)})") from error
    for name, length in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size < length:
            raise DamagedCheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes of {length}")


def _check_format(file: Path) -> None:
    try:
        backend = json.loads(file.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file.parent} is damaged: it has no {file.name}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{file.parent} is damaged: {file.name} is unreadable ({one_line(error)})"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(f"{file.parent} is a checkpoint of kind {backend!r}, this version reads torch_dist")


def describe_files(folder: Path, names: Iterable[str], block_bytes: int = BLOCK_BYTES) -> dict[str, dict[str, Any]]:
    """For each file its length and the hashes (xxh3_128, in hexadecimal) of its blocks. Reads all of them."""
    described = {}
    for name in names:
        size = (folder / name).stat().st_size
        hashes = [_block_hash(folder / name, start, block_bytes) for start in range(0, size, block_bytes)]
        described[name] = {"bytes": size, "block_bytes": block_bytes, "xxh3_128": hashes}
    return described


def check_content(path: Path, files: Mapping[str, dict[str, Any]], rank: int = 0, ranks: int = 1) -> None:
    """Compares this rank's share of all blocks with what ``describe_files`` said. No collective.

    Raises:
        DamagedCheckpointError: naming the file that is missing, of another length, or of other content.
    """
    blocks = []
    for name, told in sorted(files.items()):
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is missing")
        if size != told["bytes"]:
            raise DamagedCheckpointError(f"{path} is damaged: {name} has {size} bytes of {told['bytes']}")
        blocks += [(name, i * told["block_bytes"], told["block_bytes"], h) for i, h in enumerate(told["xxh3_128"])]
    for name, start, length, wanted in blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]:
        if _block_hash(path / name, start, length) != wanted:
            raise DamagedCheckpointError(
                f"{path} is damaged: {name} does not hold what was written (from byte {start} on)"
            )


def _block_hash(file: Path, start: int, length: int) -> str:
    digest = xxhash.xxh3_128()
    # Unbuffered, into memory that is there: the interpreter is left to the training step meanwhile.
    buffer = memoryview(bytearray(min(length, _READ_BYTES)))
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while length > 0 and (got := stream.readinto(buffer[:length])):
            digest.update(buffer[:got])
            length -= got
    return digest.hexdigest()


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an error says in one line, with its type where it says nothing.

    The first line, but of torch's report of all ranks the last, which has the cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1 if isinstance(error, CheckpointException) else 0][:limit]
