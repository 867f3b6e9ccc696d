"""What can be found out about one committed shard, from its files' sizes to every position decoded.

A check is one of three tasks, so that a large shard keeps many processes busy: the whole shard without its values, some
of its files, some of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import google_crc32c
import numpy as np
import xxhash

from megatron_kd.cache.array_reader import BLOSC_OVERHEAD, MAX_METADATA_BYTES, ArrayReader
from megatron_kd.cache.array_writer import ABSENT, CRC_BYTES
from megatron_kd.cache.commits import CommitRecord, read_commit
from megatron_kd.cache.json_text import parse_json
from megatron_kd.cache.mass import check_mass
from megatron_kd.cache.rank_table import IdCoding
from megatron_kd.cache.row import check_row, content_hash
from megatron_kd.cache.schema import ArraySpec, parse_array
from megatron_kd.cache.shard_reader import ShardReader
from megatron_kd.cache.storage import NOT_THERE, Storage, StoredFile, concerns_one_file
from megatron_kd.cache.store import Cache, open_cache, ranges
from megatron_kd.cache.writer import group_attributes
from megatron_kd.errors import CacheError, StoreUnreachableError

Level = Literal["inventory", "structure", "crc", "deep"]
LEVELS: tuple[Level, ...] = get_args(Level)

_READ_BYTES = 1 << 24  # at a time
_TASK_BYTES = 1 << 23  # of small files that go together
_TASK_SLOTS = 1 << 22  # positions · K of the rows that go together: about a tenth of a second
_DECODING_COST = 5  # measured: decoding and checking a row, relative to the checksums of its bytes
_MOST_PROBLEMS = 20  # of one task; a cache written by a faulty program has as many as rows


@dataclass(frozen=True)
class Check:
    """One task: some files or some rows of a shard, the shard as a whole where neither is given.

    Attributes:
        attempt: the shard's directory, for files.
        files: their names with the xxh3_128 on record.
        rows: their numbers within the shard, [start, stop).
        weight: how much work it is, to show progress; comparable within a shard.
    """

    shard: int
    attempt: str = ""
    files: tuple[tuple[str, str], ...] = ()
    rows: tuple[int, int] | None = None
    weight: float = 1.0

    def __str__(self) -> str:
        part = f", rows {self.rows[0]} to {self.rows[1] - 1}" if self.rows else ""
        return f"the checks of shard {self.shard}{part or ', '.join(['', *(name for name, _ in self.files[:3])])}"


@dataclass
class Found:
    """What a check found.

    Attributes:
        problems: one line each.
        unreadable: likewise, of what the system refuses to read, which may be sound.
        attempt, row_count, tokens, bytes: of the shard, where the whole shard was looked at and has a record.
        record_bytes: of the record itself.
        files, rows: the checks to follow at the levels asked for, first those of files, then those of rows.
    """

    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    attempt: str = ""
    row_count: int = 0
    tokens: int = 0
    bytes: int = 0
    record_bytes: int = 0
    files: list[Check] = field(default_factory=list)
    rows: list[Check] = field(default_factory=list)

    def collect[**P, T](self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Runs a check; a CacheError becomes a problem, one file that the system refuses to read is unreadable.

        Raises StoreUnreachableError where the next file would fare no better: good shards must not be taken for damaged
        ones because a connection broke.
        """
        try:
            return check(*args, **kwargs)
        except OSError as error:
            what = f"{error.filename or 'the cache'} cannot be read: {error.strerror or error}"
            if isinstance(error, NOT_THERE):
                _add(self.problems, what)
            elif concerns_one_file(error):
                _add(self.unreadable, what)
            else:
                raise StoreUnreachableError(what) from error
        except StoreUnreachableError as error:
            if not concerns_one_file(error):
                raise
            _add(self.unreadable, str(error))
        except CacheError as error:
            _add(self.problems, str(error))
        return None


def _add(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


class ShardChecker:
    """Does checks of one cache, those of the level inventory in any number of threads.

    Memory: two rows decoded, and 16 MiB or one inner chunk if that is larger."""

    def __init__(self, path: Path | str | Cache, level: Level) -> None:
        """``level``: how far the check of a whole shard goes, and which checks it names to follow."""
        self._cache = open_cache(path)
        self._coding = IdCoding(self._cache.rank_table)
        self._depth = LEVELS.index(level)
        self._opened: ShardReader | None = None

    def __call__(self, check: Check) -> Found:
        """Does one check. Never raises for what is wrong with the shard, but for a store that does not answer."""
        found = Found()
        if check.rows is not None:
            self._check_rows(check.shard, *check.rows, found)
        elif check.files:
            folder = self._cache.shard_storage(check.attempt)
            for name, digest in check.files:
                found.collect(_check_file, folder, name, digest)
        else:
            record_or_none = found.collect(read_commit, self._cache, check.shard)
            if record_or_none is not None:
                self._check_shard(record_or_none, found)
        return found

    def _check_shard(self, record: CommitRecord, found: Found) -> None:
        found.attempt, found.row_count = record.attempt, record.rows
        found.tokens, found.bytes, found.record_bytes = record.tokens, record.stored_bytes, len(record.to_json())
        folder = self._cache.shard_storage(record.attempt)
        found.collect(_check_inventory, folder, record)
        if self._depth < LEVELS.index("structure") or found.problems or found.unreadable:
            return
        found.collect(_check_group, self._cache, folder, record)
        for spec in self._cache.manifest.arrays.values():
            found.collect(_check_structure, folder, spec)
        reader = found.collect(self._open, record.shard_index)
        if reader is None or found.problems or found.unreadable:
            return
        if self._depth >= LEVELS.index("crc"):
            found.files = list(self._file_checks(record))
        if self._depth >= LEVELS.index("deep"):
            found.rows = list(self._row_checks(record, reader))

    def _open(self, shard: int) -> ShardReader:
        # Kept, because the next check is mostly one of the same shard.
        if self._opened is None or self._opened.shard_index != shard:
            self._opened = ShardReader(self._cache, self._coding, shard)
        return self._opened

    def _file_checks(self, record: CommitRecord) -> Iterator[Check]:
        group: list[tuple[str, str]] = []
        size = 0
        for name, entry in sorted(record.objects.items()):
            if group and size + entry["bytes"] > _TASK_BYTES:
                yield Check(record.shard_index, record.attempt, files=tuple(group), weight=size)
                group, size = [], 0
            group.append((name, entry["xxh3_128"]))
            size += entry["bytes"]
        yield Check(record.shard_index, record.attempt, files=tuple(group), weight=size)

    def _row_checks(self, record: CommitRecord, reader: ShardReader) -> Iterator[Check]:
        cost = _DECODING_COST * record.stored_bytes / record.tokens
        most = _TASK_SLOTS // self._cache.manifest.top_k
        start = positions = 0
        for row in range(record.rows):
            positions += reader.length(row)
            if positions >= most or row == record.rows - 1:
                yield Check(record.shard_index, rows=(start, row + 1), weight=cost * positions)
                start, positions = row + 1, 0

    def _check_rows(self, shard: int, start: int, stop: int, found: Found) -> None:
        reader = found.collect(self._open, shard)
        if reader is None:
            return
        for row in range(start, stop):
            found.collect(_check_content, self._cache, reader, row)
        beyond = len(found.problems) - _MOST_PROBLEMS
        if beyond > 0:
            samples = self._cache.manifest.shard_samples(shard)[start:stop]
            del found.problems[_MOST_PROBLEMS:]
            found.problems.append(f"{beyond} more of the samples {samples[0]}–{samples[-1]} are damaged")


def _check_inventory(folder: Storage, record: CommitRecord) -> None:
    found = {file.name: file.size for file in folder.files()}
    for name, entry in record.objects.items():
        if found.get(name) != entry["bytes"]:
            size = f"{found[name]} bytes" if name in found else "nothing"
            raise CacheError(f"{folder.where(name)}: the commit record has {entry['bytes']} bytes, the disk {size}")
    extra = sorted(found.keys() - record.objects.keys())
    if extra:
        raise CacheError(f"{folder.location} holds files that its commit record does not name: {', '.join(extra[:5])}")


def _check_group(cache: Cache, folder: Storage, record: CommitRecord) -> None:
    try:
        attributes = parse_json(folder.read("zarr.json", MAX_METADATA_BYTES))["attributes"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{folder.where('zarr.json')} is not the metadata of a zarr group: {error}") from error
    if attributes != group_attributes(cache, record.shard_index):
        raise CacheError(f"{folder.where('zarr.json')} has other attributes than cache.json: {attributes}")


def _check_structure(folder: Storage, spec: ArraySpec) -> None:
    array = ArrayReader(folder.below(spec.name))
    name = f"{spec.name}/zarr.json"
    stored = parse_json(folder.read(name, MAX_METADATA_BYTES))
    # ArrayReader reads more than we write, so the metadata is compared as a whole.
    if stored != spec.metadata(array.length):
        wanted = parse_array(spec.metadata(array.length), spec.name).spec
        raise CacheError(f"{folder.where(name)} describes {array.spec}, cache.json needs {wanted}")
    extents = array.extents()
    absent = np.flatnonzero((extents == ABSENT).any(-1))
    if len(absent):
        raise CacheError(f"{array.path}: inner chunks {ranges(absent.tolist())} were never written")
    ends = extents.sum(-1)
    # Our writer leaves no gap: chunks follow each other from 0 to the index.
    if extents[0, 0] != 0 or (extents[1:, 0] != ends[:-1]).any() or ends[-1] != array.size - array.index_bytes:
        raise CacheError(f"{array.path}: inner chunks do not follow each other from the start of the file to the index")
    wrong = np.flatnonzero(
        (extents[:, 1] <= CRC_BYTES) | (extents[:, 1] > spec.chunk_bytes + BLOSC_OVERHEAD + CRC_BYTES)
    )
    if len(wrong):
        raise CacheError(f"{array.path}: inner chunks {ranges(wrong.tolist())} have an impossible size")


def _check_file(folder: Storage, name: str, digest: str) -> None:
    """crc32c of every inner chunk and xxh3_128 of the file, of bytes that are read once."""
    whole = xxhash.xxh3_128()
    with closing(_Sequential(folder.open(name))) as file:
        if not name.endswith("zarr.json"):
            array = ArrayReader(folder.below(name.split("/")[0]))
            damaged = [chunk for chunk, payload in _chunks(file, array, whole) if not _passes_crc(payload)]
            if damaged:
                raise CacheError(
                    f"{folder.where(name)}: inner chunks {ranges(damaged)} (of {array.spec.inner[0]} elements each) "
                    "fail their crc32c, the file is damaged"
                )
        while data := file.read(_READ_BYTES):
            whole.update(data)
    if whole.hexdigest() != digest:
        raise CacheError(f"{folder.where(name)} is damaged: its xxh3_128 is not the one in the commit record")


class _Sequential:
    """Reads an open file from its start to its end."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self._at = file, 0

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end of the file. Raises CacheError where it was truncated meanwhile."""
        end = min(self._at + max(size, 0), self._file.size)
        if end == self._at:
            return b""
        (data,) = self._file.read([(self._at, end)])
        self._at = end
        return data

    def close(self) -> None:
        self._file.close()


def _chunks(file: _Sequential, array: ArrayReader, whole: xxhash.xxh3_128) -> Iterator[tuple[int, np.ndarray]]:
    """The stored bytes (u8) of every inner chunk with its number; all that is read also goes into the hash."""
    ends: Sequence[int] = array.extents().sum(-1).tolist()
    first = begin = 0
    while first < len(ends):
        last = first + 1  # chunks [first, last) come by one read
        while last < len(ends) and ends[last] - begin <= _READ_BYTES:
            last += 1
        data = file.read(ends[last - 1] - begin)
        if len(data) < ends[last - 1] - begin:
            raise CacheError(f"{array.path} is truncated: it ends at {begin + len(data)} bytes")
        whole.update(data)
        stored = np.frombuffer(data, "u1")
        at = 0
        for chunk in range(first, last):
            yield chunk, stored[at : ends[chunk] - begin]
            at = ends[chunk] - begin
        first, begin = last, ends[last - 1]


def _passes_crc(payload: np.ndarray) -> bool:
    return google_crc32c.value(payload[:-CRC_BYTES]) == int.from_bytes(payload[-CRC_BYTES:].tobytes(), "little")


def _check_content(cache: Cache, shard: ShardReader, row: int) -> None:
    manifest = cache.manifest
    sample = manifest.shard_samples(shard.shard_index)[row]
    try:
        decoded = shard.row(row, 0, shard.length(row))
    except CacheError as error:
        raise CacheError(f"sample {sample}: {error}") from error
    if content_hash(decoded, manifest.value_dtype) != shard.content_hash(row):
        raise CacheError(f"sample {sample} in {shard.folder} does not decode to what was committed")
    check_row(
        decoded,
        vocab_size=manifest.vocab_size,
        top_k=manifest.top_k,
        extra_temperatures=len(manifest.temperatures) - 1,
    )
    check_mass(decoded, manifest.temperatures, manifest.value_dtype)
