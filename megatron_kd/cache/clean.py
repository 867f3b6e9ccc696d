"""What crashed or beaten writers left in a cache, with sizes, and its removal."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_kd.cache.storage import Storage
from megatron_kd.cache.store import Cache, open_cache
from megatron_kd.cache.text import counted, printable, size_text
from megatron_kd.cache.writer import orphans, remove_orphans


@dataclass(frozen=True)
class Leftover:
    """An attempt or a temporary file that no commit record names.

    Attributes:
        name: relative to the cache.
        bytes: of its files.
        idle_s: since something was last written in it.
    """

    name: str
    bytes: int
    idle_s: float


@dataclass(frozen=True)
class CleanReport:
    """What ``clean`` removed, or would remove, and what it left because a running writer may need it.

    Attributes:
        removed: gone, or with ``dry_run`` to go.
        kept: written to too short a while ago.
    """

    dry_run: bool
    idle_s: float
    removed: list[Leftover]
    kept: list[Leftover]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**dataclasses.asdict(self), "bytes": sum(leftover.bytes for leftover in self.removed)}

    def text(self) -> str:
        """A line for each leftover, then the sum."""
        does = "would remove" if self.dry_run else "removed"
        lines = [
            f"{verb} {printable(leftover.name)}: {size_text(leftover.bytes)}, idle for {leftover.idle_s / 3600:.1f} h"
            for verb, leftovers in ((does, self.removed), ("kept", self.kept))
            for leftover in leftovers
        ]
        size = size_text(sum(leftover.bytes for leftover in self.removed))
        kept = f"; {len(self.kept)} left, written to in the last {self.idle_s / 3600:g} h" if self.kept else ""
        return "\n".join([*lines, f"{does} {counted(len(self.removed), 'leftover')} of {size}{kept}"])


def clean(path: Path | str | Cache, idle_s: float = 86400.0, *, dry_run: bool = False) -> CleanReport:
    """Removes leftovers in which nothing was written for ``idle_s`` seconds, so that running writers keep theirs.

    Raises:
        CacheError: where there is no cache, or a commit record is damaged: nobody then knows what is in use.
        ValueError: for a negative time.
    """
    if not idle_s >= 0:
        raise ValueError(f"idle_s is {idle_s}, must not be negative")
    cache = open_cache(path)
    found = {orphan: _measure(cache.storage, orphan) for orphan in orphans(cache)}
    seen = {orphan: leftover for orphan, leftover in found.items() if leftover is not None}
    if dry_run:
        gone = {orphan for orphan, leftover in seen.items() if leftover.idle_s >= idle_s}
    else:
        gone = set(remove_orphans(cache, idle_s))
    return CleanReport(
        dry_run,
        idle_s,
        removed=[leftover for orphan, leftover in seen.items() if orphan in gone],
        kept=[leftover for orphan, leftover in seen.items() if orphan not in gone],
    )


def _measure(storage: Storage, name: str) -> Leftover | None:
    written = storage.last_written(name)
    if written is None:
        return None  # its writer, or another clean-up, took it away meanwhile
    return Leftover(name, storage.total_bytes(name), max(0.0, time.time() - written))
