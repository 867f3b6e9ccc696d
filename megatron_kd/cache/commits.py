"""Commit records: one small JSON file makes an attempt the shard, and says what must be found in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megatron_kd.cache.identity import HASH_BYTES
from megatron_kd.cache.store import CAPTURE_AGAIN, Cache, missing_samples, ranges, reported
from megatron_kd.errors import CacheError
from megatron_kd.files import fsync_directory


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
    """Raises CacheError for a shard that is not committed, or a record that is damaged or of another cache."""
    samples = cache.manifest.shard_samples(shard_index)
    path = cache.commit_path(shard_index)
    try:
        record = CommitRecord(**json.loads(path.read_bytes()))
        fitting = (
            record.shard_index == shard_index
            and record.rows == len(samples) == len(record.row_hashes) == len(record.content_hashes)
            and all(len(bytes.fromhex(value)) == HASH_BYTES for value in record.row_hashes)
            and record.objects.keys() == object_names(cache)
            and all(isinstance(entry["bytes"], int) and entry["xxh3_128"] for entry in record.objects.values())
        )
    except FileNotFoundError as error:
        raise CacheError(
            f"shard {shard_index} of {cache.path} (samples {ranges(samples)}) was never committed; "
            f"missing in all: samples {missing_samples(cache)}; {CAPTURE_AGAIN}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CacheError(f"{path} is damaged: {error}; {_remove(path)}") from error
    if not fitting:
        raise CacheError(f"{path} does not have the fields of shard {shard_index}; {_remove(path)}")
    if record.cache_id != cache.manifest.cache_id:
        raise CacheError(
            f"{path} belongs to the cache {record.cache_id}, not to this one ({cache.manifest.cache_id}); "
            f"{_remove(path)}"
        )
    return record


def _remove(path: object) -> str:
    return f"remove {path} and run `megatron-kd capture` again, it writes that shard anew"


def object_names(cache: Cache) -> set[str]:
    """The files every shard of a cache has, relative to its directory."""
    arrays = cache.manifest.arrays.values()
    return {"zarr.json", *(f"{a.name}/{file}" for a in arrays for file in ("zarr.json", a.object_name))}


def discard_shard(cache: Cache, shard_index: int) -> None:
    """Takes a shard out of the cache, so that it is missing: its commit record is removed, damaged or not.

    Its files stay, for readers that have them open, as an orphan that ``remove_orphans`` collects.

    Raises:
        CacheError: the disk refuses.
    """
    path = cache.commit_path(shard_index)
    with reported(path, "removing"):
        path.unlink(missing_ok=True)
        fsync_directory(cache.commits_folder)
