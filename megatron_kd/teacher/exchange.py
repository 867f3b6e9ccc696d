"""Answers for a global batch, from the ranks that have them to the ranks that need them.

A rank has (needs) a share: some rows, and of each the same positions. Every rank knows all shares, so that both sides
know without a word what goes where: one ``all_to_all``, in which a rank receives exactly what it needs and once, W
numbers for each of its positions, and sends what others lack. Where several ranks have the same (replicas of a
tensor-parallel group) each takes its own, and the others' requests are spread over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """Rows of a global batch and positions of a row: what one rank has or needs.

    Attributes:
        rows: consecutive, empty for nothing.
        runs: ascending runs of positions, none of them empty.
    """

    rows: range
    runs: tuple[range, ...]

    @property
    def width(self) -> int:
        """Positions of a row."""
        return sum(map(len, self.runs))

    @property
    def size(self) -> int:
        """Positions in all: a share as a tensor is [size, W], row by row."""
        return len(self.rows) * self.width

    def places(self, rows: range, runs: Sequence[range]) -> Tensor:
        """int64: where parts of this share lie in its tensor, row by row. Each run lies within one of the share's."""
        columns, start = [], 0
        for own in self.runs:
            columns += [torch.arange(r.start, r.stop) - own.start + start for r in runs if r.start in own]
            start += len(own)
        first = torch.arange(rows.start, rows.stop)[:, None] - self.rows.start
        return (first * self.width + torch.cat(columns)).flatten()


def part_of(runs: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """The positions from the start-th to before the stop-th of some runs."""
    found, at = [], 0
    for run in runs:
        first, last = max(start - at, 0), min(stop - at, len(run))
        if first < last:
            found.append(run[first:last])
        at += len(run)
    return tuple(found)


@dataclass(frozen=True)
class Exchange:
    """One rank's side of moving shares.

    Attributes:
        sent: int64, places in this rank's share, in the order of the ranks they go to; ``send_counts``: how many each.
        kept: int64, where what arrives belongs, in the order of the ranks it comes from; ``receive_counts``.
    """

    sent: Tensor
    send_counts: list[int]
    kept: Tensor
    receive_counts: list[int]

    @classmethod
    def between(cls, have: Sequence[Share], need: Sequence[Share], rank: int, device: torch.device) -> Self:
        """The side of one rank; ``have`` and ``need`` are those of all ranks, together covering what is needed.

        Touches no process group.
        """
        owners: dict[Share, list[int]] = {}
        for owner, share in enumerate(have):
            if share.size:
                owners.setdefault(share, []).append(owner)
        ranks = range(len(have))
        sent: list[list[Tensor]] = [[] for _ in ranks]
        kept: list[list[Tensor]] = [[] for _ in ranks]
        for taker, wanted in enumerate(need):
            for owner, share, rows, runs in _parts(owners, wanted, taker):
                if owner == rank:
                    sent[taker].append(share.places(rows, runs))
                if taker == rank:
                    kept[owner].append(wanted.places(rows, runs))
        arriving = _joined(kept)
        assert len(arriving) == need[rank].size, "the shares do not cover what this rank needs"
        return cls(
            _joined(sent).to(device),
            [sum(map(len, places)) for places in sent],
            arriving.to(device),
            [sum(map(len, places)) for places in kept],
        )

    def move(self, mine: Tensor) -> Tensor:
        """What this rank has [have.size, W] → what it needs [need.size, W], of the same W and dtype on every rank.

        Collective over the default group. For a moment W numbers of what is sent and twice what is needed exist.
        """
        arrived = mine.new_empty(len(self.kept), mine.shape[1])
        dist.all_to_all_single(arrived, mine.index_select(0, self.sent), self.receive_counts, self.send_counts)
        return torch.empty_like(arrived).index_copy_(0, self.kept, arrived)


def _parts(
    owners: dict[Share, list[int]], wanted: Share, taker: int
) -> Iterator[tuple[int, Share, range, tuple[range, ...]]]:
    """Who gives which part of what is wanted: the taker itself where it can."""
    for share, ranks in owners.items():
        rows = _overlap(share.rows, wanted.rows)
        runs = tuple(run for a in share.runs for b in wanted.runs if (run := _overlap(a, b)))
        if rows and runs:
            yield taker if taker in ranks else ranks[taker % len(ranks)], share, rows, runs


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _joined(parts: list[list[Tensor]]) -> Tensor:
    every = [places for of_rank in parts for places in of_rank]
    return torch.cat(every) if every else torch.empty(0, dtype=torch.int64)
