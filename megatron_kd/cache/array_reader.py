"""Reads slices of one sharded zarr array: positional reads, every inner chunk checked by its crc32c."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

from megatron_kd.cache.array_writer import ABSENT, BLOSC, CRC_BYTES, INDEX_ENTRY
from megatron_kd.cache.json_text import parse_json
from megatron_kd.cache.schema import ArraySpec, parse_array
from megatron_kd.cache.storage import NOT_THERE, Storage, open_storage
from megatron_kd.errors import CacheError, StoreUnreachableError

MAX_METADATA_BYTES = 2**16

BLOSC_OVERHEAD = 16  # its header; data that do not shrink are copied behind it
_BLOSC_SIZES = struct.Struct("<4xIII")  # decoded, block, stored with the header


class ArrayReader:
    """Random access to [N, …] elements. Holds an open file and the decoded index; closes when collected.

    Safe in threads and after a fork: reads are positional and share no state but one replaceable cached chunk.
    """

    def __init__(
        self, folder: Path | Storage, expected_bytes: int | None = None, expected: ArraySpec | None = None
    ) -> None:
        """Opens the array in ``folder``, which has zarr.json and the object.

        Args:
            expected_bytes: the object's size, where it is on record.
            expected: of which dtype and width the array must be.

        Raises:
            CacheError: for metadata of another kind, a wrong size, an index that fails its checksum.
        """
        storage = open_storage(folder)
        name = storage.location.rpartition("/")[2]
        self._cached: tuple[int, np.ndarray] | None = None
        try:
            stored = parse_array(parse_json(storage.read("zarr.json", MAX_METADATA_BYTES)), name)
            self.spec, self.length = stored.spec, stored.length
            if expected is not None and (self.spec.dtype, self.spec.width) != (expected.dtype, expected.width):
                raise CacheError(
                    f"{storage.location} holds {self.spec.dtype} {self.spec.width}, "
                    f"cache.json needs {expected.dtype} {expected.width}"
                )
            self._file = storage.open(stored.spec.object_name, expected_bytes)
            self.close = self._file.close
            self.path, self.size = self._file.where, self._file.size
            self._index = self._read_index(stored.index_entries, stored.index_at_start)
        except ValueError as error:
            raise CacheError(f"{storage.location} cannot be opened: {error}") from error
        except OSError as error:
            kind = CacheError if isinstance(error, NOT_THERE) else StoreUnreachableError
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise kind(f"{storage.location} cannot be opened: {why}") from error

    def _read_index(self, entries: int, at_start: bool) -> np.ndarray:
        size = entries * 2 * INDEX_ENTRY.itemsize
        if self.size < size + CRC_BYTES:
            raise CacheError(f"{self.path} has {self.size} bytes, less than its index of {size + CRC_BYTES}")
        begin = 0 if at_start else self.size - size - CRC_BYTES
        (data,) = self._file.read([(begin, begin + size + CRC_BYTES)])
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
        if start == stop:
            return np.empty((0, *self.spec.width), self.spec.dtype)
        step = self.spec.inner[0]
        cached = self._cached
        wanted = range(start // step, (stop - 1) // step + 1)
        missing = [chunk for chunk in wanted if cached is None or chunk != cached[0]]
        extents = self._extents(missing)  # checked before memory is taken for what they decode to
        out = np.empty((stop - start, *self.spec.width), self.spec.dtype)
        for chunk, payload in self._fetch(missing, extents):
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
        ((_, payload),) = self._fetch([chunk], self._extents([chunk]))
        self._check_crc(chunk, payload)

    def extents(self) -> np.ndarray:
        """u64 [chunks, 2]: offset and size of every inner chunk, ``ABSENT`` twice for one never written."""
        return self._index[: self.chunks]

    def _extents(self, chunks: list[int]) -> list[tuple[int, int]]:
        """Offset and size of ascending chunks. Raises CacheError unless all lie in the file, each in its own place."""
        extents: list[tuple[int, int]] = [tuple(entry) for entry in self._index[chunks].tolist()]
        for chunk, (offset, size) in zip(chunks, extents, strict=True):
            if offset == ABSENT:
                raise CacheError(f"{self.path}: inner chunk {chunk} ({self._positions(chunk)}) was never written")
            if size <= CRC_BYTES or offset + size > self.size:
                raise CacheError(f"{self.path} is truncated: inner chunk {chunk} ({self._positions(chunk)}) is cut off")
            if size > self.spec.chunk_bytes + BLOSC_OVERHEAD + CRC_BYTES:
                raise CacheError(f"{self.path}: inner chunk {chunk} ({self._positions(chunk)}) has an impossible size")
        if sum(size for _, size in extents) > self.size:
            raise CacheError(f"{self.path}: its inner chunks overlap, the shard index is damaged")
        return extents

    def _fetch(self, chunks: list[int], extents: list[tuple[int, int]]) -> Iterator[tuple[int, np.ndarray]]:
        """The stored bytes (u8) of chunks, by one read where they lie one behind the other."""
        if not chunks:
            return
        groups: list[tuple[int, int]] = []
        group_of: list[int] = []
        for offset, size in extents:
            if groups and groups[-1][1] == offset:
                groups[-1] = (groups[-1][0], offset + size)
            else:
                groups.append((offset, offset + size))
            group_of.append(len(groups) - 1)
        parts = [np.frombuffer(part, "u1") for part in self._file.read(groups)]
        for chunk, (offset, size), group in zip(chunks, extents, group_of, strict=True):
            begin = offset - groups[group][0]
            yield chunk, parts[group][begin : begin + size]

    def _check_crc(self, chunk: int, payload: np.ndarray) -> None:
        if google_crc32c.value(payload[:-CRC_BYTES]) != int.from_bytes(payload[-CRC_BYTES:].tobytes(), "little"):
            raise CacheError(
                f"{self.path}: inner chunk {chunk} ({self._positions(chunk)}) fails its crc32c, the file is damaged"
            )

    def _decode(self, chunk: int, payload: np.ndarray, out: np.ndarray) -> None:
        self._check_crc(chunk, payload)
        data = payload[:-CRC_BYTES]
        # Blosc believes its header, and fills a larger destination only in part and says nothing.
        decoded, block, stored = _BLOSC_SIZES.unpack_from(data) if len(data) >= BLOSC_OVERHEAD else (0, 0, 0)
        if decoded != self.spec.chunk_bytes or stored != len(data) or not 0 < block <= decoded:
            raise CacheError(f"{self.path}: inner chunk {chunk} does not decode to {self.spec.chunk_bytes} bytes")
        try:
            BLOSC.decode(data, out=out)
        except (RuntimeError, ValueError) as error:
            raise CacheError(f"{self.path}: inner chunk {chunk} cannot be decompressed: {error}") from error

    def _positions(self, chunk: int) -> str:
        step = self.spec.inner[0]
        return f"elements {chunk * step} to {min((chunk + 1) * step, self.length) - 1}"
