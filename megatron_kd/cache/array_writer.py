"""Writes one sharded zarr array as a stream: inner chunks as they fill, the index behind them, then zarr.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
import xxhash

from megatron_kd.cache.schema import ZSTD_LEVEL, ArraySpec

# Process-wide, on purpose: blosc's own threads give other bytes from run to run, and do not survive a fork.
numcodecs.blosc.use_threads = False
BLOSC = numcodecs.Blosc("zstd", ZSTD_LEVEL, numcodecs.Blosc.BITSHUFFLE)

CRC_BYTES = 4
INDEX_ENTRY = np.dtype("<u8")  # an inner chunk has two: offset in the file, size with its crc32c
ABSENT = 2**64 - 1  # both entries of a chunk that was never written


def describe(data: bytes) -> dict[str, Any]:
    """Size and hash of a whole object, as commit records hold them."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


def write_object(path: Path, data: bytes) -> dict[str, Any]:
    """Writes and syncs a new file; returns its description."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return describe(data)


class ArrayWriter:
    """``append`` in order, then ``close``. Holds one inner chunk in memory, whatever the length of the array."""

    def __init__(self, folder: Path, spec: ArraySpec) -> None:
        """Creates ``folder`` and the array's only object in it."""
        folder.mkdir()
        self._folder = folder
        self._spec = spec
        self._pending = np.zeros(spec.inner, spec.dtype)
        self._filled = 0
        self._length = 0
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self._hash = xxhash.xxh3_128()
        self._file = open(folder / spec.object_name, "xb")  # noqa: SIM115 (closed by close or abort)

    def append(self, values: np.ndarray) -> None:
        """Adds [n, …] elements of the array's dtype and width."""
        self._length += len(values)
        chunk = self._spec.inner[0]
        while len(values):
            if self._filled == 0 and len(values) >= chunk:
                self._write_chunk(np.ascontiguousarray(values[:chunk]))
                values = values[chunk:]
                continue
            taken = min(chunk - self._filled, len(values))
            self._pending[self._filled : self._filled + taken] = values[:taken]
            self._filled += taken
            values = values[taken:]
            if self._filled == chunk:
                self._write_chunk(self._pending)
                self._filled = 0

    def _write_chunk(self, values: np.ndarray) -> None:
        payload = BLOSC.encode(values)
        self._write(payload + google_crc32c.value(payload).to_bytes(CRC_BYTES, "little"))
        self._index.append((self._offset - len(payload) - CRC_BYTES, len(payload) + CRC_BYTES))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)

    def close(self) -> dict[str, dict[str, Any]]:
        """Writes what is left, the index and zarr.json, all synced. Returns the objects' descriptions by name."""
        if self._filled:
            self._pending[self._filled :] = 0
            self._write_chunk(self._pending)
            self._filled = 0
        index = np.array(self._index, INDEX_ENTRY).tobytes()
        self._write(index + google_crc32c.value(index).to_bytes(CRC_BYTES, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        metadata = json.dumps(self._spec.metadata(self._length), indent=2).encode()
        return {
            f"{self._spec.name}/{self._spec.object_name}": {
                "bytes": self._offset,
                "xxh3_128": self._hash.hexdigest(),
            },
            f"{self._spec.name}/zarr.json": write_object(self._folder / "zarr.json", metadata),
        }

    def abort(self) -> None:
        """Closes the file; what was written of it has no meaning. Harmless after ``close``."""
        self._file.close()
