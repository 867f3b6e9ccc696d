"""Rows that are added so that ranks run alike are the last ones, and go again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.rows import joined, padded
from megatron_kd.teacher.topk import ExtractedTopK
from megatron_kd.training.heldout import HeldoutRows

LENGTH, TOP_K = 3, 2


def answer(tokens: torch.Tensor) -> ExtractedTopK:
    """What a teacher might say of rows [b, s]: numbers from which row and position can be told; sequence first."""
    flat = tokens.t().flatten()
    kept = torch.stack([flat, flat + 1], dim=1)
    targets = TopKTargets(kept.to(torch.int32), -kept.float(), -flat.float(), 1.0)
    return ExtractedTopK(targets, {2.0: (flat.float(), 2 * flat.float())})


@given(rows=st.integers(1, 9), size=st.integers(1, 4))
@settings(max_examples=40)
def test_micro_batches_joined_are_the_whole(rows: int, size: int) -> None:
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH)
    filled = padded(tokens, rows + -rows % size)
    assert len(filled) % size == 0 and torch.equal(filled[:rows], tokens) and not filled[rows:].any()
    ours = joined([answer(part) for part in filled.split(size)], LENGTH, rows)
    whole = answer(tokens)
    for name in ("ids", "logprobs", "tail_logmass"):
        assert torch.equal(getattr(ours.targets, name), getattr(whole.targets, name)), name
    for a, b in zip(ours.log_normalizers[2.0], whole.log_normalizers[2.0], strict=True):
        assert torch.equal(a, b)


@given(rows=st.integers(1, 30), size=st.integers(1, 5), ranks=st.integers(1, 5))
@settings(max_examples=40)
def test_ranks_share_the_heldout_rows_in_as_many_portions(rows: int, size: int, ranks: int) -> None:
    heldout = HeldoutRows(None, None, range(100, 100 + rows), size)  # type: ignore[arg-type]
    shared = [heldout.portions(rank, ranks) for rank in range(ranks)]
    assert len({len(portions) for portions in shared}) == 1
    every = [sample for portions in shared for portion in portions for sample in portion]
    assert sorted(every) == list(range(100, 100 + rows))
    assert all(len(portion) <= size for portions in shared for portion in portions)
