"""Fills a cache of ours from a cache of another system, shard by shard, as a capture would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.importers.convert import convert
from megatron_kd.cache.importers.evidence import Evidence
from megatron_kd.cache.importers.source import Samples, Source
from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.presence import make_folders
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, committed_of, create_cache, missing_shards, shards_in_words
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import write_shard
from megatron_kd.errors import CacheError, StoreUnreachableError
from megatron_kd.progress import Advance, progress
from megatron_kd.versions import installed_versions

SHARD_TOKENS = 2 * 2**20
"""Positions of a shard unless told otherwise: about half a gigabyte at K = 100."""
_SCORED_POSITIONS = 4096
_NAMED_RECORDS = 3  # in a message


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
        matched_by: ``tokens`` where each row was found by its own, ``order`` where the order had to be trusted.
        rows_imported: of them in this run; the others were there already.
        surplus_rows: rows of the source that belong to no sample.
        positions_scaled: positions of lossily compressed rows that added up to more than 1.
        tails_at_floor: positions whose tail by subtraction was at or below the floor.
        evidence: the sign test of ``Evidence`` over the rows of this run.
    """

    cache: str
    engine: str
    matched_by: str
    rows: int
    surplus_rows: int
    top_k: int
    vocab_size: int
    value_dtype: str
    rows_imported: int = 0
    tokens_imported: int = 0
    positions_scaled: int = 0
    tails_at_floor: int = 0
    seconds: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        rate = self.tokens_imported / self.seconds if self.seconds else 0.0
        return {**self.__dict__, "evidence": self.evidence.to_dict(), "tokens_per_s": rate}

    def text(self) -> str:
        """Two lines for people."""
        by = "by their tokens" if self.matched_by == "tokens" else "by their order, which was trusted"
        return (
            f"{self.cache}: {self.rows} rows of {self.engine}, {self.rows_imported} imported now, matched {by}; "
            f"{self.surplus_rows} rows of the source belong to no sample\n"
            f"tails by subtraction, {self.tails_at_floor} of them at the floor; the real next token was among the "
            f"candidates at {self.evidence.own:,} positions where another row's was not, "
            f"the other way round at {self.evidence.other:,}"
        )


def import_cache(
    source: Source,
    samples: Samples,
    path: Path | str,
    *,
    vocab_size: int,
    teacher: str = "unknown",
    rows_per_shard: int | None = None,
    trust_order: bool = False,
    show_progress: bool = False,
) -> ImportReport:
    """Writes what is missing of the cache at ``path``; committed shards are kept.

    Args:
        vocab_size: V of the teacher; ids are below it.
        teacher: its name, kept in the manifest.
        trust_order: accept rows that carry no tokens. They are still refused where their candidates do not fit the
            samples (``Evidence``).

    Raises:
        CacheError: for an order that was not trusted, another cache at ``path``, damage of the source, committed
            shards whose files are missing or have other sizes than their records say, rows that do not belong to
            the samples, and when the disk refuses. Shards committed until then stay valid.
    """
    if not source.proven and not trust_order:
        raise CacheError(
            f"the rows of {source.engine} carry no tokens, so nothing proves that row i belongs to sample i of "
            f"{samples.path}. If they were scored in the order of these samples, say so with --trust-order"
        )
    if vocab_size < samples.vocab_size:
        raise CacheError(f"--vocab-size {vocab_size} is less than the {samples.vocab_size} tokens of {samples.path}")
    cache = _create(source, samples, path, vocab_size, teacher, rows_per_shard)
    make_folders(cache)
    _require_sound(cache)
    todo = missing_shards(cache)
    rows = sum(len(cache.manifest.shard_samples(shard)) for shard in todo)
    report = ImportReport(
        cache=str(path),
        engine=source.engine,
        matched_by="tokens" if source.proven else "order",
        rows=len(samples),
        surplus_rows=source.surplus_rows,
        top_k=cache.manifest.top_k,
        vocab_size=vocab_size,
        value_dtype=source.value_dtype,
    )
    started = time.monotonic()
    with progress(f"import → {path}", rows, unit="rows", enabled=show_progress) as advance:
        for shard in todo:
            if write_shard(cache, shard, _rows(cache, source, samples, shard, report, advance)):
                report.rows_imported += len(cache.manifest.shard_samples(shard))
    report.tokens_imported = report.rows_imported * samples.seq_length
    report.seconds = time.monotonic() - started
    return report


def _require_sound(cache: Cache) -> None:
    """Names and sizes of what is committed, as a capture looks at them: a truncated shard must not pass for done."""
    report = verify(cache, "inventory", shards=committed_of(cache))
    if report.unreadable_shards:
        raise StoreUnreachableError(f"{cache.location}: {report.problems[0]}; nothing was imported")
    if report.damaged_shards:
        damaged = report.damaged_shards
        records = ", ".join(cache.storage.where(cache.commit_name(shard)) for shard in damaged[:_NAMED_RECORDS])
        more = f" and {len(damaged) - _NAMED_RECORDS} more" if len(damaged) > _NAMED_RECORDS else ""
        raise CacheError(
            f"{cache.location}: {shards_in_words(damaged)} damaged: {report.problems[0]}. Remove {records}{more} and "
            "import again, which writes them anew; `megatron-kd cache verify` finds all damage"
        )


def _create(
    source: Source, samples: Samples, path: Path | str, vocab_size: int, teacher: str, rows_per_shard: int | None
) -> Cache:
    first = source.read(0)
    # Candidates number ids better than tokens do; those of the first row are the same in every run.
    scored = np.where(first.ids < vocab_size, first.ids, -1)[:_SCORED_POSITIONS]
    table = build_rank_table(samples.token_counts(vocab_size=vocab_size), scored)
    manifest = CacheManifest(
        rows=len(samples),
        rows_per_shard=rows_per_shard or max(1, SHARD_TOKENS // samples.seq_length),
        top_k=min(source.top_k, vocab_size),
        vocab_size=vocab_size,
        rank_table_hash=rank_table_hash(table),
        value_dtype=source.value_dtype,
        teacher={
            "name": teacher,
            "engine": source.engine,
            "tail": "by subtraction",
            "matched_by": "tokens" if source.proven else "order",
            "source": dict(source.identity),
        },
        tokenizer=samples.tokenizer_identity,
        corpus={"content": samples.manifest["content"], "samples": samples.manifest["samples"]},
        library_versions=installed_versions("megatron-kd", "numcodecs", "numpy"),
    )
    return create_cache(path, manifest, table)


def _rows(
    cache: Cache, source: Source, samples: Samples, shard: int, report: ImportReport, advance: Advance
) -> Iterator[Row]:
    """The rows of a shard. Raises after the last one where they do not belong to their tokens: then none is kept."""
    manifest = cache.manifest
    where = ""
    for sample in manifest.shard_samples(shard):
        found = source.read(sample)
        done = convert(
            sample,
            found,
            samples,
            top_k=manifest.top_k,
            vocab_size=manifest.vocab_size,
            value_dtype=manifest.value_dtype,
            lossy=source.lossy,
        )
        where = found.where
        report.evidence.add(done.row, samples.tokens((sample + 1) % len(samples)), where)
        report.positions_scaled += done.scaled
        report.tails_at_floor += done.floored
        yield done.row
        advance(1)
    report.evidence.require(where)
