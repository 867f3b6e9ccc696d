"""Writes shards: a private attempt directory, everything synced, then one create-only commit record.

One writer fills a whole shard; two writers of the same shard do the work twice and one of them wins. A crash at any
moment leaves an attempt directory that no record names: garbage, never a wrong row.
"""

from __future__ import annotations

import errno
import json
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.array_writer import ArrayWriter, write_object
from megatron_kd.cache.commits import CommitRecord, attempt_shard, read_commit, read_commits
from megatron_kd.cache.mass import check_mass
from megatron_kd.cache.presence import require_shards
from megatron_kd.cache.rank_table import IdCoding
from megatron_kd.cache.row import Row, check_row, content_hash
from megatron_kd.cache.schema import temperature_name
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.store import (
    Cache,
    committed_of,
    is_rank_table,
    open_cache,
    rank_table_name,
    reported,
    stray_records,
)
from megatron_kd.cache.values import delta_encode, to_patterns
from megatron_kd.errors import CacheError

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_MASS_STRIDE = 64  # adding up every position would cost as much as compressing it; `verify` does


def write_shard(path: Path | str | Cache, shard_index: int, rows: Iterable[Row]) -> bool:
    """Writes and commits one shard.

    Args:
        path: a cache made by ``create_cache``; give the ``Cache`` itself to save reading its manifest each time.
        rows: the shard's rows in the order of their ids, all of them; consumed one at a time, so a generator keeps
            memory small. Not touched if the shard is committed already.

    Returns:
        True if this call committed the shard, False if it was or became committed by another.

    Raises:
        CacheError: for rows that do not belong to the shard or are not as ``Row`` says, and when the disk refuses;
            nothing of the shard is then published.
    """
    cache = open_cache(path)
    shard_index = int(shard_index)  # numpy integers are not JSON
    samples = cache.manifest.shard_samples(shard_index)
    storage, commit = cache.storage, cache.commit_name(shard_index)
    name = f"shards/{shard_index:06d}-{uuid.uuid4().hex}"
    staged: Path | None = None
    asked = False
    try:
        with reported(storage.where(name), "writing shard"):
            if storage.exists(commit):
                return False
            staged = storage.staging(name)
            record = _write_attempt(cache, staged, name, shard_index, samples, rows)
            storage.publish(staged, name, record.objects)
            asked = True
            committed = storage.create(commit, record.to_json().encode())
    except BaseException as error:
        # A record may have been published although an error followed, its answer may be lost, or it may yet come about:
        # an orphan does less harm than a record without files.
        if staged is not None:
            if (not asked or _surely_refused(error)) and not _may_be_committed(storage, commit):
                storage.discard(staged, name)
            else:
                storage.published(staged)
        raise
    if not committed:
        storage.discard(staged, name)
        return False
    storage.published(staged)
    return True


def _surely_refused(error: BaseException) -> bool:
    """Whether the system said no, rather than nothing, to a file's creation. ``error`` as ``reported`` raises it."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _REFUSALS


def _may_be_committed(storage: Storage, commit: str) -> bool:
    try:
        return storage.exists(commit)
    except (OSError, CacheError):
        return True  # nobody knows: an orphan does less harm than a record without files


def _write_attempt(
    cache: Cache, folder: Path, name: str, shard_index: int, samples: range, rows: Iterable[Row]
) -> CommitRecord:
    """Fills the folder of attempt ``name``, every file synced, and returns the record that would commit it."""
    with ExitStack() as stack:
        arrays = {}
        for spec in cache.manifest.arrays.values():
            arrays[spec.name] = ArrayWriter(folder / spec.name, spec)
            stack.callback(arrays[spec.name].abort)
        filler = _ShardFiller(cache, arrays)
        for row in rows:
            if filler.rows == len(samples):
                raise CacheError(f"shard {shard_index} has {len(samples)} rows; sample {row.sample_id} is one too many")
            if row.sample_id != samples[filler.rows]:
                raise CacheError(
                    f"row {filler.rows} of shard {shard_index} must be sample {samples[filler.rows]}, "
                    f"not {row.sample_id}"
                )
            filler.add(row)
        if filler.rows != len(samples):
            raise CacheError(
                f"shard {shard_index} needs {len(samples)} rows (one writer, whole shard): got {filler.rows}"
            )
        objects: dict[str, dict[str, Any]] = {}
        for writer in arrays.values():
            objects |= writer.close()
    group = {"zarr_format": 3, "node_type": "group", "attributes": group_attributes(cache, shard_index)}
    objects["zarr.json"] = write_object(folder / "zarr.json", json.dumps(group, indent=2).encode())
    return CommitRecord(
        cache_id=cache.manifest.cache_id,
        shard_index=shard_index,
        attempt=name.rpartition("/")[2],
        rows=len(samples),
        tokens=filler.tokens,
        objects=objects,
        row_hashes=filler.row_hashes,
        content_hashes=filler.content_hashes,
    )


def group_attributes(cache: Cache, shard_index: int) -> dict[str, Any]:
    """The attributes of a shard's zarr group: what a reader without ``cache.json`` needs."""
    manifest = cache.manifest
    return {
        "format_version": manifest.format_version,
        "cache_id": manifest.cache_id,
        "shard_index": shard_index,
        "first_sample": manifest.shard_samples(shard_index)[0],
        "top_k": manifest.top_k,
        "vocab_size": manifest.vocab_size,
        "value_dtype": manifest.value_dtype,
        "temperatures": list(manifest.temperatures),
        "rank_table_hash": manifest.rank_table_hash,
    }


class _ShardFiller:
    """Checks rows and appends them to the arrays of one shard."""

    def __init__(self, cache: Cache, arrays: dict[str, ArrayWriter]) -> None:
        self._manifest = cache.manifest
        self._coding = IdCoding(cache.rank_table)
        self._arrays = arrays
        self._extra = [temperature_name(temperature) for temperature in cache.manifest.temperatures[1:]]
        self._documents = 0
        self.rows = self.tokens = 0
        self.row_hashes: list[str] = []
        self.content_hashes: list[str] = []
        for name in ("sample_offsets", "document_index"):
            arrays[name].append(np.zeros(1, "<i8"))

    def add(self, row: Row) -> None:
        manifest = self._manifest
        check_row(
            row,
            vocab_size=manifest.vocab_size,
            top_k=manifest.top_k,
            extra_temperatures=len(self._extra),
        )
        check_mass(row, manifest.temperatures, manifest.value_dtype, stride=_MASS_STRIDE)
        self.rows += 1
        self.tokens += len(row)
        self._documents += len(row.document_offsets)
        self.row_hashes.append(row.hash.hex())
        self.content_hashes.append(content_hash(row, manifest.value_dtype))
        values = {
            "rank": self._coding.encode(row.ids),
            "logprob_delta": delta_encode(to_patterns(row.logprobs, manifest.value_dtype)),
            "tail_logmass": row.tail_logmass,
            "tokens": row.tokens,
            "loss_mask": row.loss_mask,
            "document_starts": row.document_offsets,
            "sample_offsets": np.array([self.tokens], "<i8"),
            "document_index": np.array([self._documents], "<i8"),
        }
        for e, name in enumerate(self._extra):
            values[f"log_normalizer_{name}"] = row.log_normalizers[e]
            values[f"tail_logmass_{name}"] = row.tail_logmass_extra[e]
        for name, array in values.items():
            self._arrays[name].append(array)


def orphans(path: Path | str | Cache) -> list[str]:
    """Attempts that no commit record names, temporary files, unused rank tables: of crashed, beaten, running writers.

    Also the records of shards that the cache cannot have.

    Returns:
        Names relative to the cache.

    Raises:
        CacheError: a commit record is damaged, or one of the cache's folders is not there (``require_shards``).
    """
    cache = open_cache(path)
    require_shards(cache)
    storage = cache.storage
    # Attempts first: one that is committed after this listing is then found in the records, not taken for garbage.
    attempts = _names(storage, "shards")
    used = {record.attempt for record in read_commits(cache, committed_of(cache))}
    temporary = [
        name
        for folder in ("", "commits/")
        for name in (f"{folder}{file}" for file in _names(storage, folder.rstrip("/")))
        if name.rpartition("/")[2].startswith(".") and name.endswith(".tmp")
    ]
    # Of several first writers one publishes cache.json: the tables of the others are never used.
    tables = [name for name in storage.names() if is_rank_table(name) and name != rank_table_name(cache.manifest)]
    unused = (f"shards/{attempt}" for attempt in attempts if attempt not in used)
    return [*unused, *stray_records(cache), *temporary, *tables]


def _names(storage: Storage, folder: str) -> list[str]:
    try:
        return storage.below(folder).names()
    except FileNotFoundError:
        return []  # a cache in which nothing was committed may lack them


def remove_orphans(path: Path | str | Cache, idle_s: float = 86400.0) -> list[str]:
    """Removes orphans in which nothing was written for ``idle_s`` seconds, so that running writers keep theirs.

    Returns:
        What was removed, by names relative to the cache.

    Raises:
        CacheError: where there is no cache, a commit record is damaged, or the disk refuses.
    """
    cache = open_cache(path)
    removed = []
    for orphan in orphans(cache):
        try:
            written = cache.storage.last_written(orphan)
            # Removing many takes a while, in which a writer that stood still may have committed.
            if written is None or time.time() - written < idle_s or _is_used(cache, orphan):
                continue
            with reported(cache.storage.where(orphan), "removing"):
                cache.storage.remove(orphan)
        except FileNotFoundError:
            continue  # its writer, or another clean-up, took it away meanwhile
        removed.append(orphan)
    return removed


def _is_used(cache: Cache, orphan: str) -> bool:
    """Whether the record of its shard names an attempt by now."""
    attempt = orphan.removeprefix("shards/")
    shard = attempt_shard(attempt)
    if shard is None or shard >= cache.manifest.shards or not cache.storage.exists(cache.commit_name(shard)):
        return False
    return read_commit(cache, shard).attempt == attempt
