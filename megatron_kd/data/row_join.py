"""Which row of a cache holds the targets of a sample, told by the row hashes that its commit records list.

Made for ten million rows: hashes are arrays of 16 bytes (numpy's ``S16``, which compares them as bytes), each rank
reads and hashes its share, and all get the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_kd.cache.commits import read_commits
from megatron_kd.cache.store import Cache, ranges
from megatron_kd.data.samples import SampleSet
from megatron_kd.device import fail_together, gather_arrays
from megatron_kd.errors import CacheError

HASH = np.dtype("S16")
MISSING = -1


def committed_hashes(cache: Cache, shards: range) -> NDArray[np.bytes_]:
    """The row hashes S16 of the rows of some shards, from their commit records. Raises as ``read_commit``."""
    digits = ("".join(record.row_hashes) for record in read_commits(cache, shards))
    return np.frombuffer(b"".join(map(bytes.fromhex, digits)), HASH)


def look_up(committed: NDArray[np.bytes_], samples: SampleSet, ids: range) -> NDArray[np.int64]:
    """The row of each of some samples, int64 [ids], ``MISSING`` where there is none. Reads the samples.

    Args:
        committed: S16 [rows], the hash of each row of the cache; of equal ones any is as good.
    """
    order = np.argsort(committed, kind="stable")
    wanted = np.frombuffer(b"".join(map(samples.row_hash, ids)), HASH)
    place = np.searchsorted(committed, wanted, sorter=order)
    rows = order[np.minimum(place, len(order) - 1)]
    return np.where(committed[rows] == wanted, rows, MISSING)


def check_found(cache: Cache, samples: SampleSet, rows: NDArray[np.int64]) -> None:
    """Raises CacheError for samples that have no row, counted and named. ``rows``: int64 [samples]."""
    missing = np.flatnonzero(rows == MISSING)
    if len(missing):
        raise CacheError(
            f"{cache.location} holds targets of other tokens than the samples {samples.path}: {len(missing)} of "
            f"{len(samples)} rows are not among the {cache.manifest.rows} there (samples {ranges(missing.tolist())}): "
            "capture these samples into another teacher.cache, or set data.samples to those it was made from"
        )


def rows_by_hash(cache: Cache, samples: SampleSet) -> NDArray[np.int64]:
    """The cache's row of each sample, int64 [samples], found by this rank alone.

    Reads all samples and the commit records, no targets.

    Raises:
        CacheError: a record that cannot be read, or samples that have no row, counted and named.
    """
    rows = look_up(committed_hashes(cache, range(cache.manifest.shards)), samples, range(len(samples)))
    check_found(cache, samples, rows)
    return rows


def rows_by_hash_together(what: str, cache: Cache, samples: SampleSet) -> NDArray[np.int64]:
    """``rows_by_hash`` by all ranks, each of which reads its share. Collective over all ranks.

    Args:
        what: is being done, for the message of the ranks that have no failure of their own.

    Raises:
        CacheError: as ``rows_by_hash``, on one rank.
        RemoteRankError: on the others.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with fail_together(what):
        ours = committed_hashes(cache, share(range(cache.manifest.shards), rank, ranks))
    committed = np.concatenate(gather_arrays(ours))
    with fail_together(what):
        found = look_up(committed, samples, share(range(len(samples)), rank, ranks))
    rows = np.concatenate(gather_arrays(found))
    with fail_together(what):
        if rank == 0:
            check_found(cache, samples, rows)
    return rows


def share(whole: range, rank: int, ranks: int) -> range:
    """A rank's run of neighbours out of ``whole``."""
    return whole[len(whole) * rank // ranks : len(whole) * (rank + 1) // ranks]


def first_foreign(cache: Cache, samples: SampleSet, rows: NDArray[np.int64], ids: Sequence[int]) -> int | None:
    """The first of some samples whose hash is not that of its row in the cache; None where all are the same.

    Each record is read once, whatever the order of the samples.

    Args:
        rows: int64 [samples], the row of each sample.
    """
    wanted = np.asarray(ids, np.int64)
    if not len(wanted):
        return None
    shards, places = np.divmod(rows[wanted], cache.manifest.rows_per_shard)
    order = np.argsort(shards, kind="stable")
    needed, begins = np.unique(shards[order], return_index=True)
    first = len(wanted)
    for record, group in zip(read_commits(cache, needed.tolist()), np.split(order, begins[1:]), strict=True):
        for i in group[group < first].tolist():
            if record.row_hashes[places[i]] != samples.row_hash(int(wanted[i])).hex():
                first = min(first, i)
    return int(wanted[first]) if first < len(wanted) else None
