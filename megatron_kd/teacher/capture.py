"""The capture job: the teacher scores every sample once, and its targets become a cache.

Shards are the unit of work: a shard is written whole by one data-parallel rank, or not at all, so that a job killed
at any moment and started again, in whatever layout, does only what is missing. Data-parallel ranks work in rounds of
one shard each; within a round all ranks exchange a word after every micro batch (with several pipeline stages, after
as many as keep them busy), so that they end together. The rows of a shard are written by the rank that holds the
answers: the first tensor-parallel rank of the last stage.
"""

from __future__ import annotations

import dataclasses
import random
import time
from dataclasses import dataclass
from typing import Any

from megatron_kd.cache.store import Cache, cache_exists, committed_shards, missing_shards, ranges, samples_of
from megatron_kd.config import Recipe
from megatron_kd.data.samples import RowBatch, SampleSet, open_samples
from megatron_kd.device import KeptFaults, StopOnSignal, fail_together, first_rank_tells, sum_over_ranks
from megatron_kd.errors import CacheError, ConfigError
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.progress import Advance, progress
from megatron_kd.teacher.capture_cache import (
    Committed,
    check_committed,
    check_samples,
    check_tokenizer,
    open_or_create_cache,
)
from megatron_kd.teacher.engine import TeacherEngine, open_teacher
from megatron_kd.teacher.part import WHOLE, Part
from megatron_kd.teacher.rows import rows_at_once, rows_together
from megatron_kd.teacher.score import READING, SCORING, attempt_score, row_dtype, rows_of
from megatron_kd.teacher.shard_writer import WAITING_ROWS, ShardWriter


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did, over all ranks of this job.

    Attributes:
        rows: of the complete cache.
        rows_captured, tokens_captured: by this job.
        seconds: scoring and writing; loading the teacher is not counted.
        tokens_per_s: of this job.
        bytes_per_token: of what is committed so far of this job's part, commit records included; 0 while nothing is.
        complete: nothing is missing, in no part.
        missing_samples: what is, in words, such as ``0–9, 40–44``; empty for a complete cache.
        stopped: a signal ended it before its part was done.
    """

    rows: int
    rows_captured: int
    tokens_captured: int
    seconds: float
    tokens_per_s: float
    bytes_per_token: float
    complete: bool
    missing_samples: str
    stopped: bool

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


def capture(recipe: Recipe, *, part: Part = WHOLE, repair: bool = False, show_progress: bool = True) -> CaptureReport:
    """Runs the job on this rank, in the teacher's own layout where it has one. Collective over all ranks of the recipe.

    SIGTERM, SIGUSR1 and Ctrl-C end it after the micro batch; shards whose rows are all scored are still committed.

    Args:
        part: the share of the shards this job does; others may run at the same time.
        repair: compare all checksums of what is committed, and capture damaged shards again.

    Raises:
        ConfigError, DataError, CheckpointError: before any work.
        CacheError: the cache belongs to another teacher or other samples, is damaged, or the disk refuses; on every
            rank, as itself or as a RemoteRankError.
        RemoteRankError: another rank failed or died.
    """
    recipe = recipe.in_teacher_layout()
    if recipe.teacher.cache is None:
        raise ConfigError("teacher.cache is not set: name the folder the captured targets go to")
    groups = join_ranks(recipe)
    with fail_together("looking at teacher.cache"):
        cache_exists(
            recipe.teacher.cache
        )  # of no use to find out after the teacher was loaded that no cache can be there
    with fail_together("opening the samples"):
        samples = open_samples(recipe.data.samples)
        check_samples(recipe, samples)
    first_rank_tells("comparing the tokenizers", lambda: check_tokenizer(recipe, samples))
    teacher = open_teacher(recipe, groups)
    show = show_progress and groups.is_first_rank
    cache = open_or_create_cache(recipe, samples, teacher, groups)
    shards = part.shards(cache.manifest.shards)
    known = check_committed(cache, shards, repair=repair, show_progress=show)
    return _Capture(recipe, samples, teacher, groups, cache, shards, known).run(show)


def draw_shards(todo: list[int], most: int, chance: random.Random) -> list[int]:
    """At most so many of the shards to do, drawn by lot.

    Two jobs over the same shards then seldom meet, where two that started together and went in order would do
    everything twice.
    """
    return chance.sample(todo, min(most, len(todo)))


class _Capture:
    """The rounds of one job over its part of the shards."""

    def __init__(
        self,
        recipe: Recipe,
        samples: SampleSet,
        teacher: TeacherEngine,
        groups: ParallelGroups,
        cache: Cache,
        shards: range,
        known: Committed,
    ) -> None:
        self._known = known
        self._samples, self._teacher, self._groups, self._cache, self._shards = samples, teacher, groups, cache, shards
        self._rows_at_once = rows_at_once(recipe, groups)
        self._dtype = row_dtype(recipe.teacher.capture.value_dtype)
        self._writing = f"writing to {cache.location}"
        self._faults = KeptFaults(READING, SCORING, self._writing)
        self._taken: set[int] = set()
        self._scored = 0
        self._started = time.monotonic()
        self._chance = random.Random()

    def run(self, show_progress: bool) -> CaptureReport:
        """All rounds, then what they came to. Collective over all ranks."""
        left, shards = self._next_round()
        stopped = False
        self._started = time.monotonic()
        with (
            StopOnSignal("ending after this micro batch") as stop,
            ShardWriter(self._cache, max(WAITING_ROWS, self._rows_at_once)) as writer,
            progress(f"capture → {self._cache.location}", left, unit="rows", enabled=show_progress) as advance,
        ):
            while shards and not stopped:
                stopped = self._score_round(shards, writer, stop, advance)
                left -= sum(len(self._cache.manifest.shard_samples(shard)) for shard in shards)
                if not stopped:
                    still_left, shards = self._next_round()
                    if still_left < left:
                        advance(left - still_left)  # another job did those
                    left = still_left
            with fail_together(self._writing):
                writer.finish()
        rows = sum(len(self._cache.manifest.shard_samples(shard)) for shard in writer.committed)
        (rows,) = sum_over_ranks([rows])
        seconds = time.monotonic() - self._started
        return first_rank_tells(f"checking {self._cache.location}", lambda: self._report(rows, seconds, stopped))

    def _next_round(self) -> tuple[int, list[int]]:
        """How many rows are left that nobody has done, and the shards that this job's ranks take next. Collective."""

        def look() -> tuple[int, list[int]]:
            todo = [s for s in missing_shards(self._cache) if s in self._shards and s not in self._taken]
            rows = sum(len(self._cache.manifest.shard_samples(shard)) for shard in todo)
            return rows, draw_shards(todo, self._groups.dp_size, self._chance)

        return first_rank_tells(f"checking {self._cache.location}", look)

    def _score_round(self, shards: list[int], writer: ShardWriter, stop: StopOnSignal, advance: Advance) -> bool:
        """One shard per data-parallel rank; ranks without one take part in the exchanges. Returns whether to stop.

        Rows are read before the exchange that comes before they are scored: ranks that split a model then all have
        them, or none begins.
        """
        self._taken.update(shards)
        samples = [self._cache.manifest.shard_samples(shard) for shard in shards]
        has_shard = self._groups.dp_rank < len(shards)
        mine = samples[self._groups.dp_rank] if has_shard else range(0)
        writes = has_shard and self._groups.writes_output
        size = self._rows_at_once
        batch = self._read(mine[:size])
        if self._agree(writer, stop):
            return True
        if writes:
            writer.begin(shards[self._groups.dp_rank])
        for begin in range(0, max(map(len, samples)), size):
            ids = mine[begin : begin + size]
            counts = [len(part[begin : begin + size]) for part in samples]
            if batch is not None:
                at_least = rows_together(self._groups, max(counts))
                self._score(ids, batch, at_least, writer if writes else None)
            batch = self._read(mine[begin + size : begin + 2 * size])
            if self._agree(writer, stop):
                writer.abandon()
                return True
            rows = sum(counts)
            self._scored += rows
            advance(rows, f"{self._tokens_per_s():,.0f} tokens/s")
        if writes:
            writer.end()
        return False

    def _read(self, ids: range) -> RowBatch | None:
        """Rows to score, of none where this rank takes part in the passes of those it shares experts with."""
        if not ids and self._groups.ep_size == 1:
            return None
        return self._faults.attempt(READING, self._samples.rows, ids)

    def _score(self, ids: range, batch: RowBatch, at_least: int, writer: ShardWriter | None) -> None:
        extracted = attempt_score(self._faults, self._teacher, batch, self._groups, at_least)
        if extracted is not None and writer is not None:
            rows = self._faults.attempt(SCORING, rows_of, ids, batch, extracted, self._dtype)
            for row in rows or ():
                writer.put(row)

    def _agree(self, writer: ShardWriter, stop: StopOnSignal) -> bool:
        """Whether any rank was told to stop; raises on all where any failed. One exchange does both."""
        self._faults.attempt(self._writing, writer.check)
        return self._faults.agree(stop.received is not None)

    def _tokens_per_s(self) -> float:
        return self._scored * self._samples.seq_length / max(time.monotonic() - self._started, 1e-9)

    def _report(self, rows_captured: int, seconds: float, stopped: bool) -> CaptureReport:
        cache, length = self._cache, self._samples.seq_length
        committed = committed_shards(cache)
        there = set(committed)
        missing = [shard for shard in range(cache.manifest.shards) if shard not in there]
        mine = [shard for shard in missing if shard in self._shards]
        if mine and not stopped:
            raise CacheError(f"{cache.location} still lacks shards {ranges(mine)}: run megatron-kd capture again")
        known = self._known.with_new(cache, (shard for shard in committed if shard in self._shards))
        return CaptureReport(
            rows=len(self._samples),
            rows_captured=rows_captured,
            tokens_captured=rows_captured * length,
            seconds=seconds,
            tokens_per_s=rows_captured * length / seconds,
            bytes_per_token=known.bytes / max(1, known.tokens),
            complete=not missing,
            missing_samples=samples_of(cache, missing),  # of one look: other jobs commit meanwhile
            stopped=stopped,
        )
