"""Reads slices of one sharded zarr array: positional reads, every inner chunk checked by its crc32c."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

from megatron_kd.cache.array_writer import ABSENT, BLOSC, CRC_BYTES, INDEX_ENTRY
from megatron_kd.cache.schema import parse_array
from megatron_kd.errors import CacheError


def _pread(descriptor: int, size: int, offset: int, path: Path) -> bytes:
    parts = []
    while size:
        part = os.pread(descriptor, size, offset)
        if not part:
            raise CacheError(f"{path} is truncated: {size} bytes from offset {offset} on are missing")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class ArrayReader:
    """Random access to [N, …] elements. Holds an open file and the decoded index; closes when collected.

    Safe in threads and after a fork: reads are positional and share no state but one replaceable cached chunk.
    """

    def __init__(self, folder: Path, expected_bytes: int | None = None) -> None:
        """``folder``: with zarr.json and the object. ``expected_bytes``: the object's size, where it is on record.

        Raises:
            CacheError: for metadata of another kind, a wrong size, an index that fails its checksum.
        """
        try:
            stored = parse_array(json.loads((folder / "zarr.json").read_bytes()), folder.name)
            self.path = folder / stored.spec.object_name
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise CacheError(f"{folder} cannot be opened: {error}") from error
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self.spec, self.length = stored.spec, stored.length
        self.size = os.fstat(descriptor).st_size
        if expected_bytes is not None and self.size != expected_bytes:
            raise CacheError(f"{self.path} has {self.size} bytes, its commit record says {expected_bytes}")
        self._index = self._read_index(stored.index_entries, stored.index_at_start)
        self._cached: tuple[int, np.ndarray] | None = None

    def _read_index(self, entries: int, at_start: bool) -> np.ndarray:
        size = entries * 2 * INDEX_ENTRY.itemsize
        if self.size < size + CRC_BYTES:
            raise CacheError(f"{self.path} has {self.size} bytes, less than its index of {size + CRC_BYTES}")
        data = _pread(self._descriptor, size + CRC_BYTES, 0 if at_start else self.size - size - CRC_BYTES, self.path)
        if google_crc32c.value(data[:size]) != int.from_bytes(data[size:], "little"):
            raise CacheError(f"{self.path}: the shard index fails its crc32c, the file is damaged")
        return np.frombuffer(data, INDEX_ENTRY, entries * 2).reshape(entries, 2)

    @property
    def index_bytes(self) -> int:
        """The size of the shard index with its crc32c."""
        return self._index.nbytes + CRC_BYTES

    @property
    def chunks(self) -> int:
        """How many inner chunks hold the array."""
        return self.spec.chunks(self.length)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) as a new array [stop − start, …]. Raises CacheError for a damaged chunk."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"[{start}, {stop}) is outside {self.path} of length {self.length}")
        out = np.empty((stop - start, *self.spec.width), self.spec.dtype)
        if start == stop:
            return out
        step = self.spec.inner[0]
        cached = self._cached
        wanted = range(start // step, (stop - 1) // step + 1)
        missing = [chunk for chunk in wanted if cached is None or chunk != cached[0]]
        for chunk, payload in self._fetch(missing):
            low, high = chunk * step, (chunk + 1) * step
            if start <= low and high <= stop:
                self._decode(chunk, payload, out[low - start : high - start])
                continue
            edge = np.empty(self.spec.inner, self.spec.dtype)
            self._decode(chunk, payload, edge)
            out[max(low, start) - start : high - start] = edge[max(start - low, 0) : stop - low]
            # The neighbouring row begins in this chunk: one that is read next finds it decoded.
            self._cached = (chunk, edge)
        if cached is not None and cached[0] in wanted:
            low = cached[0] * step
            out[max(low, start) - start : low + step - start] = cached[1][max(start - low, 0) : stop - low]
        return out

    def check_chunk(self, chunk: int) -> None:
        """Raises CacheError unless the chunk is there, inside the file, and passes its crc32c."""
        ((_, payload),) = self._fetch([chunk])
        self._check_crc(chunk, payload)

    def extents(self) -> np.ndarray:
        """u64 [chunks, 2]: offset and size of every inner chunk, ``ABSENT`` twice for one never written."""
        return self._index[: self.chunks]

    def _fetch(self, chunks: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The stored bytes (u8) of ascending chunks, by one read where they lie one behind the other."""
        extents = [(int(offset), int(size)) for offset, size in self._index[chunks]]
        for chunk, (offset, size) in zip(chunks, extents, strict=True):
            if offset == ABSENT:
                raise CacheError(f"{self.path}: inner chunk {chunk} ({self._positions(chunk)}) was never written")
            if size <= CRC_BYTES or offset + size > self.size:
                raise CacheError(f"{self.path} is truncated: inner chunk {chunk} ({self._positions(chunk)}) is cut off")
        group_start = 0
        for i in range(1, len(chunks) + 1):
            if i < len(chunks) and extents[i][0] == extents[i - 1][0] + extents[i - 1][1]:
                continue
            begin, end = extents[group_start][0], sum(extents[i - 1])
            data = np.frombuffer(_pread(self._descriptor, end - begin, begin, self.path), "u1")
            for chunk, (offset, size) in zip(chunks[group_start:i], extents[group_start:i], strict=True):
                yield chunk, data[offset - begin : offset - begin + size]
            group_start = i

    def _check_crc(self, chunk: int, payload: np.ndarray) -> None:
        if google_crc32c.value(payload[:-CRC_BYTES]) != int.from_bytes(payload[-CRC_BYTES:].tobytes(), "little"):
            raise CacheError(
                f"{self.path}: inner chunk {chunk} ({self._positions(chunk)}) fails its crc32c, the file is damaged"
            )

    def _decode(self, chunk: int, payload: np.ndarray, out: np.ndarray) -> None:
        self._check_crc(chunk, payload)
        data = payload[:-CRC_BYTES]
        # Blosc fills a larger destination only in part and says nothing: its header has the decoded size.
        if int.from_bytes(data[4:8].tobytes(), "little") != self.spec.chunk_bytes:
            raise CacheError(f"{self.path}: inner chunk {chunk} does not decode to {self.spec.chunk_bytes} bytes")
        try:
            BLOSC.decode(data, out=out)
        except (RuntimeError, ValueError) as error:
            raise CacheError(f"{self.path}: inner chunk {chunk} cannot be decompressed: {error}") from error

    def _positions(self, chunk: int) -> str:
        step = self.spec.inner[0]
        return f"elements {chunk * step} to {min((chunk + 1) * step, self.length) - 1}"
