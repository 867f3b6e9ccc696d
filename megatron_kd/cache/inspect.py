"""A summary of a cache for people: what it holds, what it costs, how much of the teacher's mass it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import Cache, committed_shards, missing_samples, open_cache

MASS_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)


def inspect(path: Path | str | Cache, sample_rows: int = 16) -> dict[str, Any]:
    """JSON values: manifest, progress, bytes per token by array, and the mass of a few rows spread over the cache.

    ``top_k_mass`` counts the unmasked positions of ``sample_rows`` rows by the probability inside their K ids:
    ``histogram`` is the share of positions in [edge, next edge), the last including 1.

    Raises:
        CacheError: where there is no cache, or a record or a sampled row is damaged.
    """
    cache = open_cache(path)
    manifest = cache.manifest
    records = [read_commit(cache, shard) for shard in committed_shards(cache)]
    tokens = sum(record.tokens for record in records)
    by_array: dict[str, int] = {}
    for record in records:
        for name, entry in record.objects.items():
            array = name.split("/")[0]
            by_array[array] = by_array.get(array, 0) + entry["bytes"]
    overhead = sum(cache.commit_path(record.shard_index).stat().st_size for record in records)
    stored = sum(by_array.values()) + overhead
    samples = [sample for record in records for sample in manifest.shard_samples(record.shard_index)]
    chosen = (
        [samples[i] for i in sorted({*np.linspace(0, len(samples) - 1, sample_rows).astype(int)})] if samples else []
    )
    return {
        "path": str(cache.path),
        "cache_id": manifest.cache_id,
        "complete": len(samples) == manifest.rows,
        "missing_samples": missing_samples(cache),
        "rows": manifest.rows,
        "rows_committed": len(samples),
        "shards": manifest.shards,
        "shards_committed": len(records),
        "top_k": manifest.top_k,
        "vocab_size": manifest.vocab_size,
        "value_dtype": manifest.value_dtype,
        "temperatures": list(manifest.temperatures),
        "tokens": tokens,
        "bytes": stored,
        "bytes_per_token": stored / tokens if tokens else None,
        "bytes_per_token_by_array": {name: size / tokens for name, size in sorted(by_array.items())},
        "top_k_mass": _mass(cache, chosen),
        "teacher": dict(manifest.teacher),
        "tokenizer": dict(manifest.tokenizer),
        "corpus": dict(manifest.corpus),
        "library_versions": dict(manifest.library_versions),
    }


def _mass(cache: Cache, samples: list[int]) -> dict[str, Any] | None:
    reader = CacheReader(cache)
    masses = []
    for row in reader.read_many(samples):
        inside = -np.expm1(row.tail_logmass.astype("<f8"))  # 1 − tail: the tail was measured, the sum is rounded
        masses.append(inside[row.loss_mask > 0])
    mass = np.concatenate(masses) if masses else np.empty(0)
    if not len(mass):
        return None
    counts, _ = np.histogram(mass, MASS_EDGES)
    return {
        "rows": len(samples),
        "positions": len(mass),
        "mean": float(mass.mean()),
        "edges": list(MASS_EDGES),
        "histogram": [float(count) / len(mass) for count in counts],
    }
