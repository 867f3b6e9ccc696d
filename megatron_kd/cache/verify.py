"""Checks a cache as thoroughly as asked for; each level includes the ones before it.

inventory   holes, records, files and their sizes, leftovers of crashed writers
structure   zarr metadata and index of every array, no chunk absent or outside its file, bounds of the rows
crc         crc32c of every inner chunk, xxh3_128 of every file
deep        every row decoded: both hashes, and all that writing refuses, at every position
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

from megatron_kd.cache.checks import LEVELS, Check, Found, Level, ShardChecker
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.presence import require_shards
from megatron_kd.cache.rank_table import check_rank_table
from megatron_kd.cache.store import (
    Cache,
    committed_shards,
    open_cache,
    ranges,
    samples_of,
    shards_in_words,
    stray_records,
)
from megatron_kd.cache.text import counted, printable, size_text
from megatron_kd.cache.workers import run_tasks, usable_cores
from megatron_kd.cache.writer import orphans
from megatron_kd.daemons import DaemonThreads
from megatron_kd.errors import StoreUnreachableError
from megatron_kd.progress import Advance, progress

__all__ = ["LEVELS", "Level", "VerifyReport", "verify"]

# CPU seconds, as measured on one core: they decide how many processes are worth their start.
_SECONDS_PER_SHARD = {"structure": 5e-3, "crc": 5e-3, "deep": 5e-3}
_SECONDS_PER_BYTE = {"structure": 0.0, "crc": 1.5e-9, "deep": 8e-9}
_WORTH_A_PROCESS = 0.5
_INVENTORY_THREADS = 8
_INVENTORY_BATCH = 256  # shards whose problems are collected at a time


@dataclass
class VerifyReport:
    """What ``verify`` found. ``ok`` says whether every row is there and passed.

    Attributes:
        level: as asked for.
        problems: one line each: what is wrong and where; holes included. In the order of the shards.
        damaged_shards: committed shards with a problem, ascending; to be captured anew.
        damaged_attempts: of each of them the attempt that was looked at; empty where the record itself is damaged.
        unreadable_shards: committed shards of which something could not be read, ascending: nobody knows whether they
            are damaged as well, and a repair must leave them alone.
        missing_samples: those of the shards that were never committed, in words; empty for none. A capture that still
            runs, or was stopped, has some and no damage.
        shards_expected, shards_committed, rows_expected, rows_committed, tokens: counts, of the shards asked for.
        bytes: of the files that committed shards consist of.
        record_bytes: of their commit records.
        orphans: attempts and temporary files that no record names. They take space and harm nothing; those of a
            capture that is running now are among them. Not looked for where only some shards are checked.
    """

    level: str
    problems: list[str] = field(default_factory=list)
    damaged_shards: list[int] = field(default_factory=list)
    damaged_attempts: list[str] = field(default_factory=list)
    unreadable_shards: list[int] = field(default_factory=list)
    missing_samples: str = ""
    shards_expected: int = 0
    shards_committed: int = 0
    rows_expected: int = 0
    rows_committed: int = 0
    tokens: int = 0
    bytes: int = 0
    record_bytes: int = 0
    orphans: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON values, ``ok`` included."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def text(self) -> str:
        """What was found in one line, then the problems, a line each."""
        verdicts = []
        if self.damaged_shards:
            verdicts.append(f"{shards_in_words(self.damaged_shards)} damaged")
        if self.unreadable_shards:
            verdicts.append(f"{shards_in_words(self.unreadable_shards)} not readable")
        if self.missing_samples:
            verdicts.append(f"incomplete, samples {self.missing_samples} are missing")
        if self.problems and not verdicts:
            verdicts.append("there are other problems")
        checked = f"{self.rows_committed:,} rows of {self.tokens:,} tokens, {size_text(self.bytes)}"
        left = f"; {counted(len(self.orphans), 'leftover')}, see `megatron-kd cache clean`" if self.orphans else ""
        head = f"{'; '.join(verdicts) or 'no problem found'} at level {self.level} ({checked}{left})"
        return "\n".join([head, *map(printable, self.problems)])


def verify(
    path: Path | str | Cache,
    level: Level = "structure",
    *,
    shards: Collection[int] | None = None,
    workers: int | None = 1,
    show_progress: bool = False,
) -> VerifyReport:
    """Checks committed shards and goes on after a problem, so that one run finds all damaged ones.

    The report is the same for any number of workers.

    Args:
        shards: those to check; of others nothing is read but the names of their records, and one record where the
            files of all of these are gone. None for all.
        workers: processes that share the work; 1 does all of it in this one, None takes as many as there are usable
            cores and as the cache is worth (none for an inventory, whose threads wait for files). More than one is for
            programs whose main module can be imported, as for ``multiprocessing``.

    Raises:
        CacheError: where there is no cache, or its manifest or rank table is damaged, or one of its folders is not
            there (``require_shards``): nothing can be judged then; and where a worker dies. An object store that does
            not answer is a StoreUnreachableError and no damage; so are files of which the system refuses every one.
        ValueError: for an unknown level or no worker, or a shard that the cache cannot have.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level!r} must be one of {', '.join(LEVELS)}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, must be at least 1")
    cache = open_cache(path)
    manifest = cache.manifest
    check_rank_table(cache.rank_table, manifest.vocab_size)
    wanted = range(manifest.shards) if shards is None else sorted(set(shards))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < manifest.shards:
        raise ValueError(f"shards must lie in [0, {manifest.shards}), not {ranges(wanted)}")
    sizes = {shard: len(manifest.shard_samples(shard)) for shard in wanted}
    report = VerifyReport(level, shards_expected=len(sizes), rows_expected=sum(sizes.values()))
    require_shards(cache, sizes)
    committed = committed_shards(cache)
    _report_holes(cache, wanted, committed, report)
    if shards is None:
        report.problems += [
            f"{cache.storage.where(name)} is no record of this cache, which has shards 0 to {manifest.shards - 1}: "
            "remove it, or let `megatron-kd cache clean` do so"
            for name in stray_records(cache)
        ]
    checked = {shard: _Shard(sizes[shard]) for shard in committed if shard in sizes}
    rows = sum(shard.rows for shard in checked.values())
    if workers is None:
        workers = 1 if level == "inventory" else _worthwhile(cache, list(checked), level)
    with progress(f"verify {level}", rows, unit="rows", enabled=show_progress) as advance:
        if level == "inventory" and workers == 1:
            _look_in_threads(cache, checked, advance)
        else:
            run_tasks(
                (Check(shard) for shard in checked),
                partial(ShardChecker, cache if workers == 1 else cache.location, level),
                lambda check, found: checked[check.shard].take(check, found, advance),
                workers,
            )
    _add_up(checked, report)
    if checked and len(report.unreadable_shards) == len(checked):
        raise StoreUnreachableError(next(iter(checked.values())).all_problems()[0])
    if shards is None:
        left = Found(report.problems, report.problems)  # a record that cannot be read is no new problem
        report.orphans = left.collect(orphans, cache) or []
    return report


def _look_in_threads(cache: Cache, checked: dict[int, _Shard], advance: Advance) -> None:
    """The inventory waits for a file system or a store, and hardly computes: several shards at a time."""
    checker, threads = ShardChecker(cache, "inventory"), DaemonThreads(_INVENTORY_THREADS, "inventory")
    try:
        for shards in batched(checked, _INVENTORY_BATCH):
            for shard, found in zip(shards, threads.map([partial(checker, Check(s)) for s in shards]), strict=True):
                checked[shard].take(Check(shard), found, advance)
    finally:
        threads.close(0)


def _report_holes(cache: Cache, wanted: Iterable[int], committed: list[int], report: VerifyReport) -> None:
    there = set(committed)
    missing = [shard for shard in wanted if shard not in there]
    if missing:
        samples = samples_of(cache, missing)
        report.missing_samples = samples
        what = f"shards {ranges(missing)} were" if len(missing) > 1 else f"shard {missing[0]} was"
        report.problems.append(f"samples {samples} are missing: {what} never committed")


def _worthwhile(cache: Cache, shards: list[int], level: Level) -> int:
    first = Found().collect(read_commit, cache, shards[0]) if shards else None
    size = first.stored_bytes if first else 0
    seconds = len(shards) * (_SECONDS_PER_SHARD[level] + size * _SECONDS_PER_BYTE[level])
    return max(1, min(usable_cores(), int(seconds / _WORTH_A_PROCESS)))


class _Shard:
    """The checks of one shard: files follow its structure, rows follow its files, each only where all was well."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.problems: dict[tuple[int, str, int], list[str]] = {}
        self.whole = Found()
        self.damaged = self.unreadable = False
        self._waiting = 1
        self._shown = 0
        self._weight = self._total = 0.0

    def all_problems(self) -> list[str]:
        """Those of the whole shard, then of files by name, then of rows."""
        return [problem for order in sorted(self.problems) for problem in self.problems[order]]

    def take(self, check: Check, found: Found, advance: Advance) -> Iterable[Check]:
        """Notes what a check found; returns those that follow."""
        following: list[Check] = []
        self._waiting -= 1
        if check.rows is None and not check.files:
            self.whole, following = found, found.files
            self._total = sum(part.weight for part in (*found.files, *found.rows))
            found.files = []  # of all shards they would be many; rows are kept until the files are done
        else:
            self._weight += check.weight
        if found.problems or found.unreadable:
            self.problems[_order(check)] = [*found.problems, *found.unreadable]
        self.damaged |= bool(found.problems)
        self.unreadable |= bool(found.unreadable)
        if not self._waiting and not following:
            following, self.whole.rows = ([] if self.problems else self.whole.rows), []
        self._waiting += len(following)
        shown = int(self.rows * self._weight / self._total) if self._waiting else self.rows
        if shown > self._shown:
            advance(shown - self._shown)
            self._shown = shown
        return following


def _order(check: Check) -> tuple[int, str, int]:
    if check.files:
        return 1, check.files[0][0], 0
    return (2, "", check.rows[0]) if check.rows else (0, "", 0)


def _add_up(shards: dict[int, _Shard], report: VerifyReport) -> None:
    for index, shard in shards.items():
        whole = shard.whole
        if whole.attempt:
            report.shards_committed += 1
            report.rows_committed += whole.row_count
            report.tokens += whole.tokens
            report.bytes += whole.bytes
            report.record_bytes += whole.record_bytes
        report.problems += shard.all_problems()
        if shard.unreadable:
            report.unreadable_shards.append(index)
        elif shard.damaged:
            report.damaged_shards.append(index)
            report.damaged_attempts.append(whole.attempt)
