"""Reads rows of a cache by sample id, in any order, each proven to be the row that was asked for."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.identity import first_difference
from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import IdCoding
from megatron_kd.cache.row import Row
from megatron_kd.cache.shard_reader import BOUNDS, ShardReader
from megatron_kd.cache.storage import NOT_THERE, is_url
from megatron_kd.cache.store import Cache, how_to_go_on, missing_samples, open_cache
from megatron_kd.errors import CacheError, ForeignRowError, StoreUnreachableError

_OPEN_SHARDS = 64
_OTHER_FILES = 128  # measured: a process that trains has 110 open beside its shards

_READERS: weakref.WeakSet[CacheReader] = weakref.WeakSet()


def _renew_locks() -> None:
    # A lock that another thread held at the fork would never be released in the child.
    for reader in _READERS:
        reader._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class CacheReader:
    """Random access to the rows of a cache that may still be growing.

    May be used from threads, inherited by forked processes, and pickled to others (they open it again). Each shard
    costs an open file per array and its index, about 16 bytes per 64 positions; ``open_shards`` bounds how many are
    kept.
    """

    def __init__(self, path: Path | str | Cache, *, open_shards: int | None = None) -> None:
        """Raises CacheError where ``path`` holds no cache. Missing rows are reported when they are read.

        Args:
            open_shards: by default 64, or fewer where their files would be more than half of those that the process may
                still have open beside what training takes.
        """
        self._cache = open_cache(path)
        self._coding = IdCoding(self._cache.rank_table)
        self._asked = open_shards
        self._open_shards = max(1, _affordable(self._cache) if open_shards is None else open_shards)
        self._shards: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()
        _READERS.add(self)

    def __reduce__(self) -> tuple[Callable[..., CacheReader], tuple[Any, ...]]:
        return _reopen, (self._cache.location, self._asked)

    @property
    def manifest(self) -> CacheManifest:
        """What the cache holds and who made it."""
        return self._cache.manifest

    def __len__(self) -> int:
        """The rows of the complete cache; sample ids are below it."""
        return self.manifest.rows

    def require_complete(self) -> None:
        """Raises CacheError naming the missing samples unless every shard is committed. Reads no shard."""
        missing = missing_samples(self._cache)
        if missing:
            raise CacheError(f"{self._cache.location} lacks samples {missing}; {how_to_go_on(self._cache)}")

    def read(
        self, sample_id: int, expected_hash: bytes | None = None, *, expected_tokens: np.ndarray | None = None
    ) -> Row:
        """A whole row.

        Args:
            expected_hash: ``row_hash`` of the sample that the caller trains on.
            expected_tokens: the tokens of that sample; with them a mismatch names the first differing position.

        Raises:
            CacheError: for a sample that is missing or damaged; a ForeignRowError for one of other tokens or documents
                than expected; a StoreUnreachableError where the disk or store refuses.
        """
        return self._read(sample_id, None, None, expected_hash, expected_tokens)

    def read_slice(
        self,
        sample_id: int,
        start: int,
        stop: int,
        expected_hash: bytes | None = None,
        *,
        expected_tokens: np.ndarray | None = None,
    ) -> Row:
        """Positions [start, stop) of a row; only their targets are decoded. The hash is that of the whole row.

        Raises:
            CacheError: as ``read``, and for positions that the row does not have.
        """
        return self._read(sample_id, start, stop, expected_hash, expected_tokens)

    def read_many(self, ids: Sequence[int], expected_hashes: Sequence[bytes] | None = None) -> list[Row]:
        """Whole rows in the order asked for, read in the order in which they lie on disk. Raises as ``read``."""
        if expected_hashes is not None and len(expected_hashes) != len(ids):
            raise ValueError(f"{len(ids)} ids, but {len(expected_hashes)} expected hashes")
        rows: dict[int, Row] = {}
        for i in sorted(range(len(ids)), key=lambda i: ids[i]):
            rows[i] = self.read(ids[i], expected_hashes[i] if expected_hashes is not None else None)
        return [rows[i] for i in range(len(ids))]

    def _read(
        self,
        sample_id: int,
        start: int | None,
        stop: int | None,
        expected_hash: bytes | None,
        expected_tokens: np.ndarray | None,
    ) -> Row:
        sample_id = int(sample_id)  # samplers hand out numpy integers and tensors
        if not 0 <= sample_id < len(self):
            raise CacheError(
                f"sample {sample_id} is not in {self._cache.location}: it holds samples 0 to {len(self) - 1}"
            )
        shard_index, row = divmod(sample_id, self.manifest.rows_per_shard)
        try:
            shard = self._shard(shard_index)
            self._compare(shard, row, expected_hash, expected_tokens)
            length = shard.length(row)
            start, stop = start if start is not None else 0, stop if stop is not None else length
            if not 0 <= start < stop <= length:
                raise CacheError(f"it has positions 0 to {length - 1}, asked were [{start}, {stop})")
            return shard.row(row, start, stop)
        except (CacheError, OSError) as error:
            kind = type(error) if isinstance(error, CacheError) else CacheError
            if isinstance(error, OSError) and not isinstance(error, NOT_THERE):
                kind = StoreUnreachableError
            hint = "; raise the limit of open files (ulimit -n)" if _too_many_open(error) else ""
            raise kind(f"sample {sample_id} of {self._cache.location} cannot be used: {error}{hint}") from error

    def _compare(self, shard: ShardReader, row: int, expected_hash: bytes | None, tokens: np.ndarray | None) -> None:
        if tokens is not None:
            cached, _ = shard.tokens(row)
            where = first_difference(cached, tokens)
            if where is not None:
                there, asked = (int(t[where]) if where < len(t) else "no token" for t in (cached, tokens))
                raise ForeignRowError(
                    f"the cache was made from other tokens: at position {where} it has {there}, the sample has {asked} "
                    f"(lengths {len(cached)} and {len(tokens)})"
                )
        if expected_hash is not None and expected_hash != shard.hash(row):
            why = "documents start elsewhere" if tokens is not None else "its tokens or document starts differ"
            why += " or its tokens saw other documents (data.packing)"
            raise ForeignRowError(
                f"the cache was made from another sample, {why}: its row hash is {shard.hash(row).hex()}, "
                f"the sample's is {expected_hash.hex()}"
            )

    def _shard(self, shard_index: int) -> ShardReader:
        with self._lock:
            shard = self._shards.get(shard_index)
            if shard is not None:
                self._shards.move_to_end(shard_index)
                return shard
        # Opened without the lock, so that threads wait only for shards they need; two may open the same one.
        shard = ShardReader(self._cache, self._coding, shard_index)
        with self._lock:
            self._shards[shard_index] = shard
            self._shards.move_to_end(shard_index)
            while len(self._shards) > self._open_shards:
                self._shards.popitem(last=False)  # its files close when no thread reads from it any more
        return shard


def _too_many_open(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def _affordable(cache: Cache) -> int:
    """How many shards may be open at a time so that the process has files left for all else it does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if is_url(cache.location) or limit == resource.RLIM_INFINITY:
        return _OPEN_SHARDS
    return min(_OPEN_SHARDS, (limit - _OTHER_FILES) // 2 // (len(cache.manifest.arrays) - len(BOUNDS)))


def _reopen(path: str, open_shards: int | None) -> CacheReader:
    return CacheReader(path, open_shards=open_shards)
