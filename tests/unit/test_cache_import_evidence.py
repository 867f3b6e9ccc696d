"""The sign test that tells rows of these tokens from rows of others."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_kd.cache.importers.evidence import Evidence
from megatron_kd.cache.row import Row
from megatron_kd.errors import CacheError


def row_of(tokens: np.ndarray, candidates: np.ndarray, mask: np.ndarray | None = None) -> Row:
    length = len(tokens)
    return Row(
        sample_id=7,
        tokens=tokens.astype("i4"),
        loss_mask=np.ones(length, "u1") if mask is None else mask.astype("u1"),
        document_offsets=np.zeros(1, "i4"),
        ids=candidates.astype("i4"),
        logprobs=np.zeros(candidates.shape, "f4"),
        tail_logmass=np.zeros(length, "f4"),
    )


def test_counts_by_hand() -> None:
    tokens, other = np.array([0, 1, 2, 3, 4]), np.array([9, 5, 2, 6, 7])
    # After position 0: own; 1: the two tokens are the same; 2: both; 3: the other's; 4 predicts nothing.
    candidates = np.array([[1, 8], [2, 8], [3, 6], [7, 8], [0, 0]])
    evidence = Evidence()
    evidence.add(row_of(tokens, candidates), other, "here")
    assert (evidence.positions, evidence.own, evidence.other) == (3, 1, 1)
    evidence.add(row_of(tokens, candidates, np.array([1, 1, 1, 0, 0])), other, "here")
    assert evidence.to_dict() == {"positions": 5, "own_next_token_only": 2, "other_next_token_only": 1}


def teacher(tokens: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Candidates [L, 4] that hold the next token at a share of the positions."""
    candidates = rng.integers(0, 1000, (len(tokens), 4))
    known = rng.random(len(tokens)) < share
    candidates[known, 0] = np.roll(tokens, -1)[known]
    return candidates


def test_right_rows_pass_and_wrong_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 1000, (40, 65))
    evidence = Evidence()
    for i, text in enumerate(texts):
        evidence.add(row_of(text, teacher(text, 0.2, rng)), texts[i - 1], "here")
        evidence.require("here")
    assert evidence.own > 10 * evidence.other
    wrong = row_of(texts[1], teacher(texts[2], 0.9, rng))
    with pytest.raises(CacheError, match=r"^here: these targets do not belong to sample 7: of 64 positions"):
        evidence.add(wrong, texts[2], "here")
    shifted = row_of(texts[1], np.roll(teacher(texts[1], 1.0, rng), 1, 0)[:, :1])
    with pytest.raises(CacheError, match=r"of 64 positions 0 have .*, 0 the reverse"):
        evidence.add(shifted, texts[2], "here")


def test_short_rows_are_judged_together() -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 1000, (10, 20))
    evidence = Evidence()
    for i in range(5):
        evidence.add(row_of(texts[i], teacher(texts[i + 5], 1.0, rng)), texts[i - 1], "here")
    assert evidence.positions < 100
    evidence.require("here")
    evidence.add(row_of(texts[9], teacher(texts[0], 1.0, rng)), texts[1], "here")
    with pytest.raises(CacheError, match="the targets up to here do not belong to the samples"):
        evidence.require("here")


def test_equal_rows_prove_nothing() -> None:
    text = np.zeros(200, int)
    evidence = Evidence()
    evidence.add(row_of(text, np.ones((200, 2))), text, "here")
    evidence.require("here")
    assert evidence.positions == 0
