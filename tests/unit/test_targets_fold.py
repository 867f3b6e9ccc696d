"""A teacher's ids that its student does not have: their mass joins the tail, in float64 and in the loss."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.losses import linear_topk_divergence
from megatron_kd.targets import TopKTargets


def targets_of(logits: torch.Tensor, k: int) -> TopKTargets:
    """The top K of float64 logits [N, V]."""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(k)
    mass = best.values.exp().sum(dim=-1)
    return TopKTargets(best.indices.int(), best.values.float(), torch.log1p(-mass.clamp(max=1 - 1e-9)).float())


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 24), st.integers(0, 2**31))
def test_folded_mass_is_the_mass_outside_what_is_left(rows: int, k: int, vocab: int, seed: int) -> None:
    logits = 3 * torch.randn(rows, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    targets = targets_of(logits, k)
    before = targets.ids.clone()
    targets.fold_beyond(vocab)
    kept = before < vocab
    assert torch.equal(targets.ids, torch.where(kept, before, -1))
    assert torch.equal(targets.logprobs.isneginf(), ~kept)
    probabilities = logits.softmax(dim=-1)
    for row in range(rows):
        inside = before[row][kept[row]].long()
        expected = 1.0 - float(probabilities[row, inside].sum())
        assert math.isclose(float(targets.tail_logmass[row].exp()), expected, abs_tol=2e-6)


def test_nothing_beyond_changes_nothing() -> None:
    targets = targets_of(torch.randn(5, 24, dtype=torch.float64), 7)
    copy = TopKTargets(targets.ids.clone(), targets.logprobs.clone(), targets.tail_logmass.clone())
    targets.fold_beyond(24)
    assert torch.equal(copy.ids, targets.ids) and torch.equal(copy.logprobs, targets.logprobs)
    torch.testing.assert_close(copy.tail_logmass, targets.tail_logmass, rtol=0, atol=1e-7)


def test_the_loss_is_that_of_the_buckets_that_are_left() -> None:
    """KL between the teacher's kept ids and one bucket, and the student's probabilities of the same, in float64."""
    generator = torch.Generator().manual_seed(3)
    teacher = 2 * torch.randn(9, 30, dtype=torch.float64, generator=generator)
    hidden, head = torch.randn(9, 8, generator=generator), torch.randn(20, 8, generator=generator)
    targets = targets_of(teacher, 6)
    kept = targets.ids < 20
    ids = targets.ids.clone().long()
    targets.fold_beyond(20)
    output = linear_topk_divergence(hidden, head, targets, torch.ones(9), vocab_size=20)
    p, q = teacher.softmax(dim=-1), (hidden.double() @ head.double().t()).softmax(dim=-1)
    for row in range(9):
        inside = ids[row][kept[row]]
        ours, theirs = torch.cat((p[row, inside], 1 - p[row, inside].sum()[None])), q[row, inside]
        theirs = torch.cat((theirs, 1 - theirs.sum()[None]))
        expected = float((ours * (ours / theirs).log()).sum())
        assert math.isclose(float(output.loss_per_token[row]), expected, rel_tol=1e-4, abs_tol=1e-5)
