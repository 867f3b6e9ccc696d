"""A summary of a cache: what it holds, what it costs, how much of the teacher's mass it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.presence import require_shards
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import Cache, committed_of, missing_samples, open_cache
from megatron_kd.errors import CacheError

MASS_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)


def inspect(path: Path | str | Cache, sample_rows: int = 16) -> dict[str, Any]:
    """JSON values: manifest, progress, bytes per token by array, and the mass of a few rows spread over the cache.

    ``top_k_mass`` counts the unmasked positions of ``sample_rows`` rows by the probability inside their K ids:
    ``histogram`` is the share of positions in [edge, next edge), the last including 1. What cannot be read is left
    out everywhere and named in ``problems``; many more are found by ``verify``.

    Raises:
        CacheError: where there is no cache, or one of its folders is not there, or it has commit records and none of
            them can be read.
    """
    cache = open_cache(path)
    require_shards(cache)
    manifest = cache.manifest
    committed = committed_of(cache)
    problems: list[str] = []
    readable: list[int] = []
    tokens = 0
    sizes: dict[str, int] = {}
    for shard in committed:
        try:
            record = read_commit(cache, shard)
        except CacheError as error:
            problems.append(str(error))
            continue
        readable.append(shard)
        tokens += record.tokens
        for name, entry in record.objects.items():
            array = name.split("/")[0]
            sizes[array] = sizes.get(array, 0) + entry["bytes"]
        sizes["commits"] = sizes.get("commits", 0) + len(record.to_json().encode())
    if committed and not readable:
        raise CacheError(problems[0])
    rows = sum(len(manifest.shard_samples(shard)) for shard in readable)
    return {
        "path": cache.location,
        "cache_id": manifest.cache_id,
        "complete": rows == manifest.rows,
        "missing_samples": missing_samples(cache),
        "problems": problems,
        "rows": manifest.rows,
        "rows_committed": rows,
        "rows_per_shard": manifest.rows_per_shard,
        "shards": manifest.shards,
        "shards_committed": len(readable),
        "top_k": manifest.top_k,
        "vocab_size": manifest.vocab_size,
        "value_dtype": manifest.value_dtype,
        "temperatures": list(manifest.temperatures),
        "tokens": tokens,
        "bytes": sum(sizes.values()),
        "bytes_per_token": sum(sizes.values()) / tokens if tokens else None,
        "bytes_per_token_by_array": {name: size / tokens for name, size in sorted(sizes.items())},
        "top_k_mass": _mass(cache, _spread(cache, readable, sample_rows), problems),
        "teacher": dict(manifest.teacher),
        "tokenizer": dict(manifest.tokenizer),
        "corpus": dict(manifest.corpus),
        "library_versions": dict(manifest.library_versions),
    }


def spread_samples(path: Path | str | Cache, count: int) -> list[int]:
    """At most ``count`` sample ids of committed shards, ascending and evenly spread; the first and the last included.

    Raises CacheError where there is no cache. Reads no shard and no record.
    """
    cache = open_cache(path)
    return _spread(cache, committed_of(cache), count)


def _spread(cache: Cache, shards: list[int], count: int) -> list[int]:
    manifest = cache.manifest
    rows = sum(len(manifest.shard_samples(shard)) for shard in shards)
    if not rows:
        return []
    chosen = sorted({*np.linspace(0, rows - 1, count).astype(int).tolist()})
    # Only the last shard may be shorter than the others.
    places = (divmod(row, manifest.rows_per_shard) for row in chosen)
    return [manifest.shard_samples(shards[shard])[row] for shard, row in places]


def _mass(cache: Cache, samples: list[int], problems: list[str]) -> dict[str, Any] | None:
    reader = CacheReader(cache)
    masses = []
    for sample in samples:
        try:
            row = reader.read(sample)
        except CacheError as error:
            problems.append(str(error))
            continue
        inside = -np.expm1(row.tail_logmass.astype("<f8"))  # 1 − tail: the tail was measured, the sum is rounded
        masses.append(inside[row.loss_mask > 0])
    mass = np.concatenate(masses) if masses else np.empty(0)
    if not len(mass):
        return None
    counts, _ = np.histogram(mass, MASS_EDGES)
    return {
        "rows": len(masses),
        "positions": len(mass),
        "mean": float(mass.mean()),
        "edges": list(MASS_EDGES),
        "histogram": [float(count) / len(mass) for count in counts],
    }
