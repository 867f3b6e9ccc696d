"""Samples and a cache of them, from a teacher that is computed here in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.config import ModelConfig
from megatron_kd.data.packing import PackedRow, concatenate
from megatron_kd.data.sample_writer import write_samples
from megatron_kd.data.samples import SampleSet

V, K = 1003, 12
IDENTITY = {"name": "toy", "sha256": "abc", "segmentation_sha256": "def", "vocab_size": V}
TEMPERATURES = (1.0, 2.5)


def packed_rows(length: int, rows: int, seed: int = 0) -> list[PackedRow]:
    """Rows of documents of uneven lengths."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, V, n, dtype=np.int32) for n in rng.integers(5, 2 * length, 3 * rows)]
    return list(concatenate(documents, length, 0))[:rows]


def make_samples(
    folder: Path,
    *,
    length: int = 9,
    rows: int = 5,
    seed: int = 0,
    identity: dict[str, Any] = IDENTITY,
    splits: dict[str, Iterable[PackedRow]] | None = None,
) -> SampleSet:
    """A set of samples, all of them in the training split unless ``splits`` says otherwise."""
    given = splits if splits is not None else {"train": packed_rows(length, rows, seed)}
    return write_samples(
        folder,
        {name: iter(part) for name, part in given.items()},
        seq_length=length,
        packing="concatenate",
        tokenizer_identity=identity,
        corpus_identity={"seed": seed},
        selection={},
    )


def logits_of(sample: int, length: int = 9) -> np.ndarray:
    """float64 [length, V], the teacher's answer to a sample."""
    return np.random.default_rng([7, sample]).normal(0, 2, (length, V))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def make_cache(
    folder: Path, samples: SampleSet, teacher: ModelConfig, *, imported: bool = False, **changes: Any
) -> None:
    """A cache of float32 values in shards of two rows; ``changes`` are of its manifest."""
    table = build_rank_table(samples.token_counts())
    manifest = CacheManifest(
        rows=len(samples),
        rows_per_shard=2,
        top_k=K,
        vocab_size=V,
        rank_table_hash=rank_table_hash(table),
        value_dtype="float32",
        temperatures=TEMPERATURES,
        teacher={
            "name": teacher.name,
            "architecture": teacher.model_dump(mode="json"),
            "weights_sha256": "a" * 64,
            **({"matched_by": "tokens"} if imported else {}),
        },
        tokenizer=samples.tokenizer_identity,
        corpus={"content": samples.manifest["content"]},
    )
    cache = create_cache(folder, replace(manifest, **changes), table)
    for shard in range(manifest.shards):
        write_shard(cache, shard, [row_of(samples, i) for i in manifest.shard_samples(shard)])


def row_of(samples: SampleSet, i: int) -> Row:
    """The teacher's answer to a sample as a row."""
    logits = logits_of(i, samples.seq_length)
    at = {t: log_softmax(logits / t) for t in TEMPERATURES}
    ids = np.argsort(-at[1.0], -1)[:, :K]

    def tail(logp: np.ndarray) -> np.ndarray:
        p = np.exp(logp)
        np.put_along_axis(p, ids, 0.0, -1)
        return np.asarray(np.log(p.sum(-1)), np.float32)

    normalizer = np.log(np.exp(at[1.0] / 2.5).sum(-1))
    return Row(
        sample_id=i,
        tokens=samples.tokens(i),
        loss_mask=samples.loss_mask(i),
        document_offsets=samples.document_offsets(i),
        ids=ids.astype(np.int32),
        logprobs=np.take_along_axis(at[1.0], ids, -1).astype(np.float32),
        tail_logmass=tail(at[1.0]),
        log_normalizers=normalizer[None].astype(np.float32),
        tail_logmass_extra=tail(at[2.5])[None],
    )
