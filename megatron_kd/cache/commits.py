"""Commit records: one small JSON file makes an attempt the shard, and says what must be found in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron_kd.cache.identity import is_hash
from megatron_kd.cache.json_text import parse_json
from megatron_kd.cache.storage import NOT_THERE
from megatron_kd.cache.store import Cache, how_to_go_on, missing_samples, reported, samples_of
from megatron_kd.errors import CacheError, StoreUnreachableError

_READ_TOGETHER = 64  # records, which take up to megabytes each
_ATTEMPT = re.compile(r"([0-9]{6,9})-[0-9a-f]{32}")


@dataclass(frozen=True)
class CommitRecord:
    """The content of ``commits/000123.json``.

    Attributes:
        cache_id: of the manifest the shard was written for.
        shard_index: i.
        attempt: the name of the directory under ``shards/``.
        rows, tokens: how many the shard has.
        objects: for every file of the shard, by its name under the attempt: ``bytes`` and ``xxh3_128``.
        row_hashes: ``row_hash`` of every row, 32 hexadecimal digits.
        content_hashes: ``content_hash`` of every row, likewise.
    """

    cache_id: str
    shard_index: int
    attempt: str
    rows: int
    tokens: int
    objects: dict[str, dict[str, Any]]
    row_hashes: list[str]
    content_hashes: list[str]

    def to_json(self) -> str:
        """JSON with a line for each field, so that records stay readable and small."""
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @property
    def stored_bytes(self) -> int:
        """The size of all objects of the shard."""
        return sum(entry["bytes"] for entry in self.objects.values())


def read_commit(cache: Cache, shard_index: int) -> CommitRecord:
    """Raises CacheError for a shard not committed, or a record that is unreadable, damaged or of another cache."""
    try:
        return _read_record(cache, shard_index, cache.commit_name(shard_index))
    except FileNotFoundError as error:
        raise CacheError(
            f"shard {shard_index} of {cache.location} (samples {samples_of(cache, [shard_index])}) was never "
            f"committed; missing in all: samples {missing_samples(cache)}; {how_to_go_on(cache)}"
        ) from error


def read_commits(cache: Cache, shards: Sequence[int]) -> Iterator[CommitRecord]:
    """The records of some shards in their order, where a read costs a round trip several at a time.

    Raises as ``read_commit``.
    """
    for begin in range(0, len(shards), _READ_TOGETHER):
        yield from cache.storage.together(
            [partial(read_commit, cache, shard) for shard in shards[begin : begin + _READ_TOGETHER]]
        )


def _read_record(cache: Cache, shard_index: int, name: str) -> CommitRecord:
    """The record of a shard in the file ``name``. Raises as ``read_commit``, and FileNotFoundError where none is."""
    samples = cache.manifest.shard_samples(shard_index)
    path, repair = cache.storage.where(name), _repair(cache)
    try:
        stored = cache.storage.read(name, _largest_record(cache, len(samples)))
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = CacheError if isinstance(error, NOT_THERE) else StoreUnreachableError
        raise kind(f"{path} cannot be read: {error.strerror}") from error
    try:
        record = CommitRecord(**parse_json(stored))
    except (ValueError, TypeError) as error:
        raise CacheError(f"{path} is damaged: {error}; {repair}") from error
    if not _fits(record, cache, shard_index, len(samples)):
        raise CacheError(f"{path} does not have the fields of shard {shard_index}; {repair}")
    if record.cache_id != cache.manifest.cache_id:
        raise CacheError(
            f"{path} belongs to the cache {record.cache_id}, not to this one ({cache.manifest.cache_id}); {repair}"
        )
    return record


def _largest_record(cache: Cache, rows: int) -> int:
    """Bytes of a record with every field as long as it can be, and as much again for another program's spaces."""
    return 2 * (4096 + 80 * rows + 256 * len(object_names(cache)))


def _fits(record: CommitRecord, cache: Cache, shard_index: int, rows: int) -> bool:
    """Whether every field has the type and form of one of this shard: nothing in it may name another file."""
    objects = record.objects
    return (
        is_hash(record.cache_id)
        and record.shard_index == shard_index
        and isinstance(record.attempt, str)
        and attempt_shard(record.attempt) == shard_index
        and record.rows == rows
        and type(record.tokens) is int
        and rows <= record.tokens < 2**63
        and all(
            isinstance(values, list) and len(values) == rows for values in (record.row_hashes, record.content_hashes)
        )
        and all(is_hash(value) for value in (*record.row_hashes, *record.content_hashes))
        and isinstance(objects, dict)
        and objects.keys() == object_names(cache)
        and all(
            isinstance(entry, dict)
            and entry.keys() == {"bytes", "xxh3_128"}
            and type(entry["bytes"]) is int
            and 0 < entry["bytes"] < 2**63
            and is_hash(entry["xxh3_128"])
            for entry in objects.values()
        )
    )


def attempt_shard(name: str) -> int | None:
    """The shard that a directory under ``shards/`` is an attempt at; None for another name."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def _repair(cache: Cache) -> str:
    if cache.manifest.imported:
        return "remove it and run `megatron-kd cache import` again"
    return "`megatron-kd capture --repair` captures the shard anew"


def object_names(cache: Cache) -> set[str]:
    """The files every shard of a cache has, relative to its directory."""
    arrays = cache.manifest.arrays.values()
    return {"zarr.json", *(f"{a.name}/{file}" for a in arrays for file in ("zarr.json", a.object_name))}


def discard_shard(cache: Cache, shard_index: int, attempt: str) -> bool:
    """Takes one attempt at a shard out of the cache, so that the shard is missing: its commit record is removed.

    Its files stay, for readers that have them open, as an orphan that ``remove_orphans`` collects. What another job
    has committed in its place is left alone.

    Args:
        attempt: as named by the record that was looked at; empty for a record that is damaged itself.

    Returns:
        Whether it was there, and is gone.

    Raises:
        CacheError: the disk refuses.
    """
    name = cache.commit_name(shard_index)

    def is_it(file: str) -> bool:
        try:
            return _read_record(cache, shard_index, file).attempt == attempt
        except FileNotFoundError:
            return False
        except StoreUnreachableError:
            raise
        except CacheError:
            return not attempt

    with reported(cache.storage.where(name), "removing"):
        return cache.storage.remove_if(name, is_it)
