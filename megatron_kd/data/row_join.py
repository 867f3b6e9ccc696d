"""Which row of a cache holds the targets of a sample, told by the row hashes that its commit records list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.store import Cache, ranges
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError


def committed_hashes(cache: Cache, rows: Sequence[int] | NDArray[np.int64]) -> Iterator[bytes]:
    """The row hash, 16 bytes, of each of some rows; a record is read once for neighbours. Raises as ``read_commit``."""
    shard, hashes = -1, list[str]()
    for row in rows:
        wanted, place = divmod(int(row), cache.manifest.rows_per_shard)
        if wanted != shard:
            shard, hashes = wanted, read_commit(cache, wanted).row_hashes
        yield bytes.fromhex(hashes[place])


def rows_by_hash(cache: Cache, samples: SampleSet) -> NDArray[np.int64]:
    """The cache's row of each sample, int64 [samples]; of rows with equal tokens and documents any is as good.

    Reads all samples and the commit records, no targets.

    Raises:
        CacheError: samples that have no row, counted and named.
    """
    place = {digest: row for row, digest in enumerate(committed_hashes(cache, range(cache.manifest.rows)))}
    found = np.array([place.get(samples.row_hash(i), -1) for i in range(len(samples))], np.int64)
    missing = np.flatnonzero(found < 0).tolist()
    if missing:
        raise CacheError(
            f"{cache.location} holds targets of other tokens than the samples {samples.path}: {len(missing)} of "
            f"{len(samples)} rows are not among the {cache.manifest.rows} there (samples {ranges(missing)}): capture "
            "these samples into another teacher.cache, or set data.samples to those it was made from"
        )
    return found


def first_foreign(cache: Cache, samples: SampleSet, rows: NDArray[np.int64], ids: Sequence[int]) -> int | None:
    """The first of some samples whose hash is not that of its row in the cache; None where all are the same.

    Args:
        rows: int64 [samples], the row of each sample.
    """
    for sample, digest in zip(ids, committed_hashes(cache, rows[list(ids)]), strict=True):
        if digest != samples.row_hash(sample):
            return sample
    return None
