"""The rows that ``bench cache`` measures, and what the ids are numbered by.

Legend: L positions of a row, K slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import build_rank_table
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import committed_shards, open_cache
from megatron_kd.errors import ConfigError

COUNTED_POSITIONS = 2048
"""Positions whose candidates the rank table is counted from: more of them make it hardly better."""
CONTEXT_PARALLEL = 2
"""Of the slices: each rank has two of the 2·cp chunks of a row."""


@dataclass(frozen=True)
class BenchRows:
    """What is measured, all of it in memory.

    Attributes:
        measured: numbered from 0, of K slots and the cache's first temperature.
        counted: other rows of the cache, of which the rank table is counted; none where the cache has one row only.
        manifest: of the cache.
        source: where they come from, in words.
    """

    measured: list[Row]
    counted: list[Row]
    manifest: CacheManifest
    source: str

    @property
    def tokens(self) -> int:
        """Positions of the measured rows."""
        return sum(map(len, self.measured))

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.measured[0].ids.shape[1])

    @property
    def counted_positions(self) -> int:
        """Positions that the rank table is counted from and that are not measured."""
        return sum(map(len, self.counted))

    def rank_table(self, *, in_sample: bool = False) -> np.ndarray:
        """u32 [V]: by the candidates of the counted rows, then by how often tokens occur in all rows.

        A capture knows all tokens before it starts, and scores some positions first; so does this.

        Args:
            in_sample: count the candidates of the measured rows themselves, as if there were no others.
        """
        everywhere = np.concatenate([row.tokens for row in (*self.measured, *self.counted)])
        counts = np.bincount(everywhere, minlength=self.manifest.vocab_size)
        rows = self.measured if in_sample or not self.counted else self.counted
        return build_rank_table(counts, np.concatenate([row.ids for row in rows]))

    def repeated(self, tokens: int) -> list[Row]:
        """The measured rows again and again under new numbers, until they have so many tokens. They share memory."""
        times = max(1, -(-tokens // self.tokens))
        return [replace(row, sample_id=i) for i, row in enumerate(self.measured * times)]


def rows_of_cache(path: Path | str, source: str, *, tokens: int, top_k: int | None) -> BenchRows:
    """Takes rows of an existing cache in a pseudo-random order, the same in every run.

    Args:
        tokens: how many to measure, at least one row and as far as there are rows.
        top_k: keep the first so many slots; by default all.

    Raises:
        CacheError: no cache, no committed shard, damaged rows.
        ConfigError: fewer slots in the cache than asked for, values that are rounded already, rows too short to cut.
    """
    cache = open_cache(path)
    manifest = cache.manifest
    if manifest.value_dtype == "bfloat16":
        raise ConfigError(
            f"{path} holds bfloat16 values, which take less space than float16 ones in any format: give a cache of "
            "float16 or float32"
        )
    if top_k is not None and top_k > manifest.top_k:
        raise ConfigError(f"--top-k is {top_k}, {path} holds {manifest.top_k} tokens a position: take fewer")
    shards = committed_shards(cache)
    if not shards:
        raise ConfigError(f"{path} has no committed shard: run `megatron-kd capture` first")
    samples = [sample for shard in shards for sample in manifest.shard_samples(shard)]
    average = sum(read_commit(cache, shard).tokens for shard in shards) / len(samples)
    counted = _share(len(samples), wanted=round(tokens / average), counted=-(-COUNTED_POSITIONS // int(average)))
    order = np.random.default_rng(0).permutation(samples).tolist()
    reader = CacheReader(cache)
    k = manifest.top_k if top_k is None else top_k
    apart = [first_slots(reader.read(sample), k) for sample in order[:counted]]
    measured: list[Row] = []
    for sample in order[counted:]:
        row = reader.read(sample)
        if len(row) < 2 * CONTEXT_PARALLEL:
            raise ConfigError(
                f"sample {sample} of {path} has {len(row)} tokens, slices need {2 * CONTEXT_PARALLEL}: give a cache of "
                "longer rows"
            )
        measured.append(replace(first_slots(row, k), sample_id=len(measured)))
        if sum(map(len, measured)) >= tokens:
            break
    return BenchRows(measured, apart, manifest, source)


def _share(rows: int, *, wanted: int, counted: int) -> int:
    """How many of a cache's rows to put aside: ``counted``, or where rows are few one in four, but never the last."""
    spare = max(rows - max(wanted, 1), rows // 4, 1 if rows > 1 else 0)
    return min(counted, spare)


def first_slots(row: Row, top_k: int) -> Row:
    """A row of its first temperature with its K' likeliest tokens; the tail takes in the mass of the others."""
    dropped = row.logprobs[:, top_k:].astype("f8")
    tail = row.tail_logmass
    if dropped.size:
        together = np.logaddexp.reduce(np.column_stack([tail, dropped]), axis=1)
        tail = np.minimum(together, 0.0).astype("f4")
    return replace(
        row,
        ids=np.ascontiguousarray(row.ids[:, :top_k]),
        logprobs=np.ascontiguousarray(row.logprobs[:, :top_k]).astype("f2", copy=False),
        tail_logmass=tail,
        log_normalizers=np.empty((0, 0), "<f4"),
        tail_logmass_extra=np.empty((0, 0), "<f4"),
    )


def zigzag_pieces(length: int, rank: int) -> Sequence[tuple[int, int]]:
    """The two chunks of a row that a context-parallel rank has: r and 2·cp − 1 − r of 2·cp, as equal as they can be."""
    chunks = 2 * CONTEXT_PARALLEL
    bounds = [length * i // chunks for i in range(chunks + 1)]
    return [(bounds[i], bounds[i + 1]) for i in (rank, chunks - 1 - rank)]
