"""Answers go from the ranks that have them to those that need them, each once, whatever the two layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.teacher.exchange import Exchange, Share, part_of
from megatron_kd.teacher.online import Standing

ROWS, LENGTH = 6, 24
CPU = torch.device("cpu")


def standings(tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, sp: bool = False) -> list[Standing]:
    """Where the ranks of a layout stand, in Megatron-Core's order."""
    ranks = product(range(pp), range(dp), range(cp), range(tp))
    return [Standing(p == pp - 1, d, dp, ContextSlice(c, cp), t, tp, sp) for p, d, c, t in ranks]


LAYOUTS = {
    "TP 4": standings(tp=4),
    "TP 4 + SP": standings(tp=4, sp=True),
    "DP 4": standings(dp=4),
    "CP 2, DP 2": standings(cp=2, dp=2),
    "PP 2, TP 2 + SP": standings(pp=2, tp=2, sp=True),
    "PP 4": standings(pp=4),
    "TP 2 + SP, CP 2": standings(tp=2, cp=2, sp=True),
}


def content(share: Share) -> torch.Tensor:
    """Each position of a share as (row, position), [size, 2]."""
    return torch.tensor([(r, p) for r in share.rows for run in share.runs for p in run]).reshape(-1, 2)


def moved(have: list[Share], need: list[Share]) -> tuple[list[torch.Tensor], list[Exchange]]:
    """What each rank ends with where ``all_to_all`` is a shuffle of lists."""
    ranks = range(len(have))
    sides = [Exchange.between(have, need, rank, CPU) for rank in ranks]
    letters = [content(have[i])[side.sent].split(side.send_counts) for i, side in enumerate(sides)]
    found = []
    for rank, side in enumerate(sides):
        arrived = [letters[sender][rank] for sender in ranks]
        assert [len(letter) for letter in arrived] == side.receive_counts
        joined = torch.cat(arrived)
        found.append(torch.empty_like(joined).index_copy_(0, side.kept, joined))
    return found, sides


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(("teacher", "student"), list(product(LAYOUTS, LAYOUTS)))
def test_every_rank_gets_what_it_needs_once(teacher: str, student: str, hidden: bool) -> None:
    have = [standing.share(ROWS, LENGTH, hidden=hidden) for standing in LAYOUTS[teacher]]
    need = [standing.share(ROWS, LENGTH, hidden=hidden) for standing in LAYOUTS[student]]
    found, sides = moved(have, need)
    for rank, share in enumerate(need):
        assert torch.equal(found[rank], content(share))
        assert sum(sides[rank].receive_counts) == share.size
        if have[rank] == share:
            assert sides[rank].receive_counts[rank] == share.size, "its own are not sent by others"


def test_ranks_without_rows_have_and_need_nothing() -> None:
    spread = [standing.rows(3) for standing in standings(dp=4)]
    assert [list(rows) for rows in spread] == [[0], [1], [2], []]
    assert [list(standing.rows(5)) for standing in standings(dp=4)] == [[0, 1], [2, 3], [4], []]
    first = standings(pp=2)[0].share(ROWS, LENGTH, hidden=True)
    assert first.size == 0 and len(content(first)) == 0


def test_requests_are_spread_over_those_that_have_the_same() -> None:
    have = [standing.share(ROWS, LENGTH, hidden=False) for standing in standings(pp=2, tp=2)]
    need = [standing.share(ROWS, LENGTH, hidden=False) for standing in standings(pp=2, tp=2)]
    need[0] = need[1] = need[2]
    _, sides = moved(have, need)
    assert [sum(side.send_counts) for side in sides] == [0, 0, 2 * ROWS * LENGTH, 2 * ROWS * LENGTH]


def test_a_part_of_runs_crosses_their_ends() -> None:
    runs = ContextSlice(0, 3).ranges(LENGTH)
    assert runs == (range(4), range(20, 24))
    assert part_of(runs, 2, 6) == (range(2, 4), range(20, 22))
    assert part_of(runs, 0, 4) == (range(4),)


def test_what_nobody_has_is_noticed() -> None:
    share = Share(range(ROWS), WHOLE.ranges(LENGTH))
    with pytest.raises(AssertionError, match="do not cover"):
        Exchange.between([replace(share, rows=range(5))], [share], 0, CPU)
