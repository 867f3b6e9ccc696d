"""What vLLM answers, in both of its forms, against a sort of dictionaries in pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.errors import CheckpointError
from megatron_kd.teacher.vllm_logprobs import row_targets

Entry = list[tuple[int, float]]
"""One position: (id, log-prob) in the order in which vLLM appends them."""


@dataclass
class Logprob:
    """The fields of vLLM's class of this name."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    """The fields of vLLM's class of this name."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_indices)


def container(entries: list[Entry | None], flat: bool) -> Any:
    """As ``append_logprobs_for_next_position`` fills it: a dictionary holds an id once, the flat form as it comes."""
    if not flat:
        return [None if entry is None else {token: Logprob(value) for token, value in entry} for entry in entries]
    filled = FlatLogprobs()
    for entry in entries:
        filled.start_indices.append(len(filled.token_ids))
        for token, value in entry or []:
            filled.token_ids.append(token)
            filled.logprobs.append(value)
            filled.ranks.append(None)
            filled.decoded_tokens.append(None)
        filled.end_indices.append(len(filled.token_ids))
    return filled


def request_output(tokens: list[int], entries: list[Entry], flat: bool) -> SimpleNamespace:
    """A ``RequestOutput``: entries[n] is the distribution after position n, the last that of the generated token."""
    generated = SimpleNamespace(logprobs=container([entries[-1]], flat))
    return SimpleNamespace(
        prompt_token_ids=tokens, prompt_logprobs=container([None, *entries[:-1]], flat), outputs=[generated]
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[Entry], int, int]:
    """Whole distributions of a few positions, what vLLM would say about them, K and V."""
    vocab = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, vocab))
    wholes, entries = [], []
    for _ in range(draw(st.integers(1, 6))):
        weights = np.array(draw(st.lists(st.integers(1, 5), min_size=vocab, max_size=vocab)), np.float64)
        whole = dict(enumerate(np.log(weights / weights.sum()).astype(np.float32).tolist()))
        best = sorted(whole, key=lambda token: (-whole[token], token))[:top_k]
        there = draw(st.integers(0, vocab - 1))
        shown = [there, *draw(st.permutations(best))]
        wholes.append(whole)
        entries.append([(token, whole[token]) for token in shown])
    return wholes, entries, top_k, vocab


@settings(max_examples=200, deadline=None)
@given(answers(), st.booleans())
def test_the_best_k_of_what_is_shown(answer: tuple[list[dict[int, float]], list[Entry], int, int], flat: bool) -> None:
    wholes, entries, top_k, vocab = answer
    got = row_targets(request_output([0] * len(entries), entries, flat), len(entries), top_k, vocab)
    assert (got.ids.dtype, got.logprobs.dtype, got.tail_logmass.dtype) == (np.int32, np.float32, np.float32)
    for n, whole in enumerate(wholes):
        best = sorted(whole, key=lambda token: (-whole[token], token))[:top_k]
        assert got.ids[n].tolist() == best
        assert got.logprobs[n].tolist() == [whole[token] for token in best]
        outside = math.fsum(math.exp(whole[token]) for token in whole if token not in best)
        if top_k == vocab:
            assert got.tail_logmass[n] == -math.inf
        else:
            assert math.isclose(math.exp(got.tail_logmass[n]), outside, rel_tol=1e-5, abs_tol=1e-6)


def test_the_tail_has_a_floor() -> None:
    """A sum that rounds to 1 and above says nothing about what is left."""
    for certain in (0.0, 1e-7):
        entries: list[Entry] = [[(3, certain), (3, certain), (1, -40.0)]]
        got = row_targets(request_output([0], entries, flat=True), 1, 2, 5)
        assert got.tail_logmass[0] == np.float32(math.log(1e-8)) and got.ids.tolist() == [[3, 1]]


GOOD: Entry = [(1, -0.5), (1, -0.5), (0, -1.0)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([(1, -0.5)], "gave 1 tokens after position 1, teacher.top_k is 2"),
        ([(1, -0.5), (1, -0.5)], "gave 1 tokens after position 1"),
        ([], "gave 0 tokens after position 1"),
        ([(1, -0.5), (4, -0.6)], "gave the token 4, teacher.model.vocab_size is 4"),
        ([(1, math.nan), (0, -1.0), (2, -2.0)], "token 1 after position 1 the log-probability nan"),
        ([(1, -0.5), (0, -math.inf)], "token 0 after position 1 the log-probability -inf"),
        ([(1, 0.5), (0, -1.0)], "token 1 after position 1 the log-probability 0.5"),
    ],
)
def test_answers_that_are_none(flat: bool, second: Entry, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        row_targets(request_output([0, 0, 0], [GOOD, second, GOOD], flat), 3, 2, 4)
    assert words in str(caught.value)


def test_positions_that_are_missing() -> None:
    output = request_output([0, 0], [GOOD, GOOD], flat=True)
    with pytest.raises(CheckpointError, match="scored 2 of 3 positions of a row, and one behind them"):
        row_targets(output, 3, 2, 4)
    output.outputs[0].logprobs = None
    with pytest.raises(CheckpointError, match="scored 2 of 2 positions of a row, and none behind them"):
        row_targets(output, 2, 2, 4)
    output.prompt_logprobs = None
    with pytest.raises(CheckpointError, match="scored none of 2"):
        row_targets(output, 2, 2, 4)
