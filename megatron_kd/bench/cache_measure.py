"""Measuring formats of targets: sizes once, rates over interleaved rounds, and that what is read is what was written.

Rates are tokens per CPU second of the process, so that waiting (for the disk, for other processes) does not count.
Files stay in the page cache.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_kd.bench.cache_formats import RANK_TABLE, Format, Stored, Targets, stored_bytes
from megatron_kd.bench.cache_rows import CONTEXT_PARALLEL, zigzag_pieces
from megatron_kd.cache.row import Row
from megatron_kd.errors import CacheError
from megatron_kd.progress import Advance

WRITE, READ, CP_READ, ORDERED_READ = "write", "read", "cp_read", "ordered_read"
OPERATIONS = (WRITE, READ, CP_READ, ORDERED_READ)


@dataclass
class Measurement:
    """What was seen of a format.

    Attributes:
        parts: bytes of the measured rows, each once, by what they belong to.
        repeated_parts: the same of the rows that the rates are of, which are more.
        value_error: the largest relative difference between a value read and the value written; 0 for bit-equal ones.
        rates: tokens per CPU second of each round, by operation.
    """

    parts: dict[str, int] = field(default_factory=dict)
    repeated_parts: dict[str, int] = field(default_factory=dict)
    value_error: float = 0.0
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})

    @property
    def bytes(self) -> int:
        """All but the rank table, of which a cache of any size has one."""
        return sum(size for part, size in self.parts.items() if part != RANK_TABLE)

    def median(self, operation: str) -> float:
        """Of the rounds."""
        return statistics.median(self.rates[operation])

    def ratio(self, operation: str, other: Measurement) -> float:
        """Median over the rounds of this rate divided by the other's in the same round."""
        return statistics.median(
            own / theirs for own, theirs in zip(self.rates[operation], other.rates[operation], strict=True)
        )


def measure(
    formats: Sequence[Format], rows: Sequence[Row], repeated: Sequence[Row], rounds: int, folder: Path, advance: Advance
) -> list[Measurement]:
    """Writes and verifies all formats, then takes the rates round by round, every round in another order of formats.

    Args:
        rows: whose sizes are taken.
        repeated: whose rates are taken, of ``rows`` in turn.
        folder: an existing one, for all files.
        advance: by one unit a format for the verification and for each round.

    Raises:
        CacheError: a format gives back something other than was written.
    """
    found = [Measurement() for _ in formats]
    opened: list[Stored] = []
    for number, (stored_as, seen) in enumerate(zip(formats, found, strict=True)):
        once, often = folder / f"{number}-once", folder / f"{number}-often"
        stored_as.write(once, rows)
        seen.parts = stored_bytes(stored_as, once)
        shutil.rmtree(once)
        stored_as.write(often, repeated)
        seen.repeated_parts = stored_bytes(stored_as, often)
        stored = stored_as.open(often)
        seen.value_error = verify(stored_as, stored, repeated)
        opened.append(stored)
        advance(1, stored_as.name)
    for round_ in range(rounds):
        first = round_ % len(formats)
        for number in (*range(first, len(formats)), *range(first)):
            _round(formats[number], opened[number], repeated, round_, folder / "again", found[number])
            advance(1, formats[number].name)
    return found


def _round(
    stored_as: Format, stored: Stored, rows: Sequence[Row], round_: int, folder: Path, into: Measurement
) -> None:
    order = np.random.default_rng(round_).permutation(len(rows)).tolist()
    pieces = [zigzag_pieces(len(rows[row]), place % CONTEXT_PARALLEL) for place, row in enumerate(order)]
    tokens = sum(map(len, rows))
    sliced = sum(stop - start for mine in pieces for start, stop in mine)

    def read() -> None:
        for row in order:
            stored.read(row)

    def read_slices() -> None:
        for row, mine in zip(order, pieces, strict=True):
            stored.read_pieces(row, mine)

    def read_in_order() -> None:
        for _ in stored.read_in_order():
            pass

    into.rates[WRITE].append(tokens / cpu_seconds(lambda: stored_as.write(folder, rows)))
    shutil.rmtree(folder)
    into.rates[READ].append(tokens / cpu_seconds(read))
    into.rates[CP_READ].append(sliced / cpu_seconds(read_slices))
    into.rates[ORDERED_READ].append(tokens / cpu_seconds(read_in_order))


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU seconds of all threads and of the kernel's work for them, without garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.process_time()
        run()
        return time.process_time() - started
    finally:
        if collecting:
            gc.enable()


def verify(stored_as: Format, stored: Stored, rows: Sequence[Row]) -> float:
    """Reads every row whole, in slices and in order.

    Returns:
        The largest relative difference of a value; 0 where all are bit-equal.

    Raises:
        CacheError: naming format, row and field, for anything else that differs, and for values that a format of the
            rows' own dtype changes.
    """
    worst = 0.0
    in_order = stored.read_in_order()
    for number, row in enumerate(rows):
        where = f"{stored_as.name} ({stored_as.values_dtype}), row {number}"
        whole, ordered = stored.read(number), next(in_order, None)
        if ordered is None:
            raise CacheError(f"{where} is missing when all rows are read in order")
        worst = max(worst, _value_error(whole, row, where), _value_error(ordered, row, where))
        for rank in range(CONTEXT_PARALLEL):
            pieces = zigzag_pieces(len(row), rank)
            for (start, stop), piece in zip(pieces, stored.read_pieces(number, pieces), strict=True):
                wanted = whole.cut(start, stop)
                for name, mine, theirs in zip(Targets._fields, piece, wanted, strict=True):
                    same = (mine is None) == (theirs is None)
                    if mine is not None and theirs is not None:
                        same = mine.shape == theirs.shape and np.array_equal(mine, theirs)
                    _require(same, f"{where}: {name} of the slice [{start}, {stop}) is not that of the row")
    _require(next(in_order, None) is None, f"{stored_as.name} has more than {len(rows)} rows")
    own = stored_as.values_dtype == rows[0].logprobs.dtype.name
    _require(worst == 0.0 or not own, f"{stored_as.name} ({stored_as.values_dtype}) changes values by {worst:.1e}")
    return worst


def _require(right: bool, what: str) -> None:
    if not right:
        raise CacheError(f"what was written does not come back: {what}")


def _value_error(found: Targets, row: Row, where: str) -> float:
    """The largest relative difference of a used slot's value. Raises CacheError for whatever else differs."""
    used = row.ids >= 0
    _require(found.ids.shape == found.logprobs.shape == row.ids.shape, f"{where}: shapes differ")
    _require(np.array_equal(found.ids[used], row.ids[used]), f"{where}: ids differ")
    for name in ("tail_logmass", "tokens"):
        values = getattr(found, name)
        _require(values is None or np.array_equal(values, getattr(row, name)), f"{where}: {name} differ")
    mine, written = found.logprobs[used], row.logprobs[used]
    if mine.dtype == written.dtype and np.array_equal(mine.view("u2"), written.view("u2")):
        return 0.0
    written, difference = written.astype("f8"), np.abs(mine.astype("f8") - written.astype("f8"))
    relative = difference / np.maximum(np.abs(written), np.finfo("f2").tiny)
    return float(relative.max(initial=0.0, where=written != -np.inf))
