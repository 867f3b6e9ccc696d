"""Rows for the cache tests: top-K of a real softmax, so that tails and normalizers are exact."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.writer import write_shard


def make_row(
    sample_id: int,
    length: int,
    *,
    top_k: int = 5,
    vocab_size: int = 64,
    dtype: str = "float16",
    temperatures: tuple[float, ...] = (1.0,),
    unused: bool = True,
) -> Row:
    """A row that depends on ``sample_id`` only. With ``unused``, every third position uses K − 2 slots."""
    rng = np.random.default_rng([sample_id, length])
    logits = rng.normal(0, 3, (length, vocab_size))
    order = np.argsort(-logits, -1, kind="stable")
    ids = order[:, :top_k].astype("i4")
    used = np.ones((length, top_k), bool)
    if unused and top_k > 2:
        used[::3, -2:] = False
    ids[~used] = -1

    def log_softmax(values: np.ndarray) -> np.ndarray:
        return values - np.log(np.exp(values).sum(-1, keepdims=True))

    def tail(logp: np.ndarray) -> np.ndarray:
        p = np.take_along_axis(np.exp(logp), order, -1)
        p[:, :top_k] *= ~used
        with np.errstate(divide="ignore"):
            return np.minimum(np.log(p.sum(-1)), 0).astype("f4")

    base = log_softmax(logits / temperatures[0])
    logprobs = np.take_along_axis(base, order[:, :top_k], -1)
    logprobs[~used] = -np.inf
    extras = temperatures[1:]
    documents = np.unique(rng.integers(0, length, 3)) if length > 3 else np.zeros(1)
    documents[0] = 0
    return Row(
        sample_id=sample_id,
        tokens=rng.integers(0, vocab_size, length, dtype="i4"),
        loss_mask=rng.integers(0, 2, length, dtype="u1"),
        document_offsets=documents.astype("i4"),
        ids=ids,
        logprobs=logprobs.astype("f2" if dtype == "float16" else "f4"),
        tail_logmass=tail(base),
        log_normalizers=np.array([np.log(np.exp(base * temperatures[0] / t).sum(-1)) for t in extras], "f4").reshape(
            len(extras), length
        ),
        tail_logmass_extra=np.array([tail(log_softmax(logits / t)) for t in extras], "f4").reshape(len(extras), length),
    )


def rank_table(vocab_size: int = 64) -> np.ndarray:
    """A table that is not the identity, with ties."""
    return build_rank_table(np.random.default_rng(vocab_size).integers(0, vocab_size // 2 + 1, vocab_size))


def make_manifest(rows: int, rows_per_shard: int, **fields: Any) -> CacheManifest:
    """K 5, V 64, float16, one temperature, unless told otherwise."""
    vocab_size = fields.get("vocab_size", 64)
    values = {
        "rows": rows,
        "rows_per_shard": rows_per_shard,
        "top_k": 5,
        "vocab_size": vocab_size,
        "rank_table_hash": rank_table_hash(rank_table(vocab_size)),
        "teacher": {"name": "teacher", "sha256": "12ab"},
        **fields,
    }
    return CacheManifest(**values)


def make_cache(path: Path, lengths: Iterable[int], rows_per_shard: int, **fields: Any) -> tuple[Cache, list[Row]]:
    """A complete cache of rows with the given lengths."""
    lengths = list(lengths)
    manifest = make_manifest(len(lengths), rows_per_shard, **fields)
    cache = create_cache(path, manifest, rank_table(manifest.vocab_size))
    rows = [
        make_row(
            sample,
            length,
            top_k=manifest.top_k,
            vocab_size=manifest.vocab_size,
            dtype="float16" if manifest.value_dtype == "float16" else "float32",
            temperatures=manifest.temperatures,
        )
        for sample, length in enumerate(lengths)
    ]
    for shard in range(manifest.shards):
        assert write_shard(cache, shard, [rows[sample] for sample in manifest.shard_samples(shard)])
    return cache, rows


def folder_of(cache: Cache) -> Path:
    """The folder of a cache on a disk."""
    return Path(cache.location)


def shards_folder(cache: Cache) -> Path:
    """Holds the attempts."""
    return folder_of(cache) / "shards"


def commits_folder(cache: Cache) -> Path:
    """Holds the commit records."""
    return folder_of(cache) / "commits"


def commit_path(cache: Cache, shard_index: int) -> Path:
    """The commit record of a shard."""
    return folder_of(cache) / cache.commit_name(shard_index)


def assert_rows_equal(found: Row, wanted: Row) -> None:
    """Every field, bit for bit."""
    for name, value in vars(wanted).items():
        other = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert other.tobytes() == value.tobytes(), name
        else:
            assert other == value, name
