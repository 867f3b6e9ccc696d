"""The ways to keep targets on disk that ``bench cache`` compares: what each must do, and this project's own.

Legend: L positions of a row, K slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import rank_table_hash
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache
from megatron_kd.cache.writer import write_shard

Piece = tuple[int, int]
RANK_TABLE = "rank_table"


class Targets(NamedTuple):
    """What reading gives back of some positions; None for what a format does not keep.

    Attributes:
        ids: integers [L, K].
        logprobs: float16 or float32 [L, K].
        tail_logmass: float32 [L].
        tokens: int32 [L].
    """

    ids: np.ndarray
    logprobs: np.ndarray
    tail_logmass: np.ndarray | None = None
    tokens: np.ndarray | None = None

    def cut(self, start: int, stop: int) -> Targets:
        """Positions [start, stop), as views."""
        tail, tokens = (None if part is None else part[start:stop] for part in (self.tail_logmass, self.tokens))
        return Targets(self.ids[start:stop], self.logprobs[start:stop], tail, tokens)


class Stored(Protocol):
    """Rows on disk, open for reading. They are numbered from 0."""

    def read(self, row: int) -> Targets:
        """A whole row, in any order."""

    def read_pieces(self, row: int, pieces: Sequence[Piece]) -> list[Targets]:
        """Some ranges of positions of a row, with no more work than the format needs for them."""

    def read_in_order(self) -> Iterator[Targets]:
        """All rows, as a run does that reads them as they were written."""


class Format(Protocol):
    """One way to keep rows."""

    @property
    def name(self) -> str:
        """In the results."""

    @property
    def values_dtype(self) -> str:
        """In which it keeps log-probabilities."""

    @property
    def remark(self) -> str:
        """What a reader of its figures must know, or nothing."""

    def write(self, folder: Path, rows: Sequence[Row]) -> None:
        """Writes rows, numbered from 0, into a folder that does not exist yet. They are all of the same K."""

    def open(self, folder: Path) -> Stored:
        """Opens what ``write`` wrote."""

    def part_of(self, file: Path) -> str:
        """The part of the format that a file (relative to the folder) belongs to."""


def stored_bytes(stored_as: Format, folder: Path) -> dict[str, int]:
    """The bytes of all files by what they belong to, the largest part first."""
    sizes: dict[str, int] = {}
    for file in folder.rglob("*"):
        if file.is_file():
            part = stored_as.part_of(file.relative_to(folder))
            sizes[part] = sizes.get(part, 0) + file.stat().st_size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class OwnFormat:
    """The project's cache as one shard, written and read as in a capture and in a training run.

    Attributes:
        rank_table: u32 [V].
        manifest: of the cache that the rows are from; row count, shard, dtype and table are replaced.
    """

    name: str
    values_dtype: str
    rank_table: np.ndarray
    manifest: CacheManifest
    remark: str = ""

    def write(self, folder: Path, rows: Sequence[Row]) -> None:
        """Creates the cache and commits its only shard: checks, hashes and syncs included."""
        manifest = replace(
            self.manifest,
            rows=len(rows),
            rows_per_shard=len(rows),
            top_k=rows[0].ids.shape[1],
            value_dtype=self.values_dtype,
            temperatures=self.manifest.temperatures[:1],
            rank_table_hash=rank_table_hash(self.rank_table),
        )
        write_shard(create_cache(folder, manifest, self.rank_table), 0, rows)

    def open(self, folder: Path) -> Stored:
        """Opens the reader that training uses."""
        return _OwnStored(folder)

    def part_of(self, file: Path) -> str:
        """The array; ``metadata`` for what describes arrays and cache; ``commit_record``; ``rank_table``."""
        if file.name.startswith(RANK_TABLE):
            return RANK_TABLE
        if file.parts[0] == "commits":
            return "commit_record"
        return "metadata" if file.suffix == ".json" else file.parent.name


class _OwnStored:
    def __init__(self, folder: Path) -> None:
        self._reader = CacheReader(folder)

    def read(self, row: int) -> Targets:
        return _targets(self._reader.read(row))

    def read_pieces(self, row: int, pieces: Sequence[Piece]) -> list[Targets]:
        return [_targets(self._reader.read_slice(row, start, stop)) for start, stop in pieces]

    def read_in_order(self) -> Iterator[Targets]:
        return map(self.read, range(len(self._reader)))


def _targets(row: Row) -> Targets:
    return Targets(row.ids, row.logprobs, row.tail_logmass, row.tokens)
