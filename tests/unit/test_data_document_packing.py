"""Whole documents in rows: every token once and in order, no row too long, nothing predicted across a boundary."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_kd.cache.identity import row_hash
from megatron_kd.data import document_packing
from megatron_kd.data.document_packing import first_fit_decreasing
from megatron_kd.data.documents import document_numbers, restarted_positions
from megatron_kd.data.names import Packing, Truncation
from megatron_kd.data.packing import PackedRow
from megatron_kd.data.packing_rule import PackingRule
from megatron_kd.data.prepare import prepare
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.tokenizer import load_tokenizer
from tests.unit.data_tokenizers import bpe, write_folder

EOS = 0
PREPARED: list[tuple[Packing, Truncation]] = [
    ("concatenate", "split"),
    ("documents", "split"),
    ("documents", "drop"),
    ("padded", "split"),
]
# A document's tokens name it and their place in it, so that a row tells what it is made of. Of some none is learned.
corpora = st.lists(st.tuples(st.integers(0, 23), st.booleans()), max_size=14)


def coded(number: int, length: int, learned: bool) -> NDArray[np.int32]:
    ids = np.arange(length, dtype=np.int32) + 100 * (number + 1)
    return ids if learned else ~ids


def rows_of(rule: PackingRule, corpus: list[tuple[int, bool]]) -> list[PackedRow]:
    return list(rule.rows(coded(i, length, learned) for i, (length, learned) in enumerate(corpus)))


def cut_by_hand(length: int, size: int, truncation: Truncation) -> list[range]:
    if truncation == "drop" and length > size:
        return []
    if truncation == "truncate":
        return [range(min(length, size))]
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


@given(corpora, st.integers(2, 17), st.sampled_from(["documents", "padded"]), st.sampled_from(get_args(Truncation)))
def test_every_token_once_in_order_and_masked_by_definition(
    corpus: list[tuple[int, bool]], size: int, packing: Packing, truncation: Truncation
) -> None:
    rule = PackingRule(packing, size, truncation, EOS, adds_eos=False)
    rows = rows_of(rule, corpus)
    wanted = [
        [100 * (number + 1) + place for place in piece]
        for number, (length, learned) in enumerate(corpus)
        for piece in cut_by_hand(length, size, truncation)
        if learned and len(piece) > 1  # what has nothing to predict is left out
    ]
    found = []
    for row in rows:
        assert (row.tokens.dtype, row.loss_mask.dtype, row.document_offsets.dtype) == (np.int32, np.uint8, np.int32)
        bounds = [*row.document_offsets.tolist(), size]
        parts = [row.tokens[start:stop].tolist() for start, stop in pairwise(bounds)]
        masks = [row.loss_mask[start:stop].tolist() for start, stop in pairwise(bounds)]
        if parts[-1][0] == EOS:
            assert set(parts[-1]) == {EOS} and not any(masks[-1])
            parts.pop(), masks.pop()
        assert masks == [[1] * (len(part) - 1) + [0] for part in parts]
        assert parts == sorted(parts) and (len(parts) == 1 or packing == "documents")
        found += parts
    assert sorted(found) == wanted
    assert [row.tokens[0] for row in rows] == sorted(row.tokens[0] for row in rows)
    if packing == "documents":  # first fit leaves no two rows that fit into one
        used = sorted(int((row.tokens != EOS).sum()) for row in rows)
        assert len(used) < 2 or used[0] + used[1] > size
    again = rows_of(rule, corpus)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(rows, again, strict=True))


@given(st.lists(st.integers(0, 60), max_size=14), st.integers(2, 17), st.sampled_from(get_args(Truncation)))
def test_what_documents_take_is_what_their_rows_hold(lengths: list[int], size: int, truncation: Truncation) -> None:
    padded = PackingRule("padded", size, truncation, EOS)
    rows = rows_of(padded, [(length, True) for length in lengths])
    alone = sum(n % size == 1 for n in (length + 1 for length in lengths if length)) if truncation == "split" else 0
    assert padded.taken(np.array(lengths, np.int64)).sum() == (len(rows) + alone) * size
    documents = PackingRule("documents", size, truncation, EOS)
    held = sum(int((row.tokens >= 100).sum()) for row in rows)
    assert held <= documents.taken(np.array(lengths, np.int64)).sum() <= held + 2 * len(lengths)


def test_an_example() -> None:
    rows = list(PackingRule("documents", 8, "split", EOS).rows(np.array(d, np.int32) for d in ([5, 6], [7] * 9, [8])))
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 0, 7, 0, 8, 0, 0], [7, 7, 7, 7, 7, 7, 7, 7]]
    assert [row.document_offsets.tolist() for row in rows] == [[0, 3, 5, 7], [0]]
    assert [row.loss_mask.tolist() for row in rows] == [[1, 1, 0, 1, 0, 1, 0, 0], [1] * 7 + [0]]


def test_prompts_are_read_and_not_learned() -> None:
    conversation = np.array([~5, ~6, 7, 8, ~9, 3], np.int32)
    (row,) = PackingRule("padded", 8, "split", EOS, adds_eos=False).rows([conversation])
    assert row.tokens.tolist() == [5, 6, 7, 8, 9, 3, EOS, EOS]
    assert row.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]


def test_first_fit_decreasing_by_hand() -> None:
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[0, 2, 3, 5], [1, 4]]
    assert first_fit_decreasing([], 3) == []


def test_a_window_bounds_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_packing, "WINDOW_ROWS", 2)
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield np.arange(1, 4, dtype=np.int32)

    rows = PackingRule("documents", 8, "split", EOS).rows(endless())  # type: ignore[arg-type]
    assert [next(rows).document_offsets.tolist() for _ in range(2)] == [[0, 4]] * 2
    assert taken == 4


def test_numbers_and_positions_of_documents() -> None:
    numbers = document_numbers([np.array([0, 3, 4], np.int32), np.array([0], np.int32)], 6)
    assert numbers.tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6]
    assert restarted_positions(torch.from_numpy(numbers)).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert document_numbers([np.array([0, 3, 4], np.int32)], 4).tolist() == [[0, 0, 0, 1]]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    """One corpus in every packing."""
    folder = tmp_path_factory.mktemp("packings")
    tokenizer = load_tokenizer(write_folder(folder / "tokenizer", bpe()))
    texts = [" ".join(f"w{i * j % 97}" for j in range(i % 23)) for i in range(150)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        f"{packing} {truncation}": prepare(
            corpus_format="jsonl",
            paths=[str(folder / "corpus.jsonl")],
            tokenizer=tokenizer,
            seq_length=48,
            packing=packing,
            truncation=truncation,
            train_tokens=1440,
            heldout_tokens=144,
            out_dir=folder / packing / truncation,
            progress=False,
        )
        for packing, truncation in PREPARED
    }


def test_samples_keep_their_packing(sets: dict[str, SampleSet]) -> None:
    for name, samples in sets.items():
        samples.verify()
        assert samples.packing == name.split()[0]
        assert samples.within_documents == (samples.packing != "concatenate")
        assert samples.splits == {"train": range(30), "heldout": range(30, 33)}
        assert samples.rows([1]).within_documents == samples.within_documents
    assert len({samples.manifest["content"] for samples in sets.values()}) == len(sets)
    filled = sum(int(sets["documents split"].loss_mask(i).sum()) for i in range(30))
    assert filled > 1.3 * sum(int(sets["padded split"].loss_mask(i).sum()) for i in range(30))


def test_rows_of_two_packings_are_never_taken_for_each_other(sets: dict[str, SampleSet]) -> None:
    tokens, offsets = np.arange(6), np.array([0, 3])
    assert row_hash(tokens, offsets) != row_hash(tokens, offsets, within_documents=True)
    whole, apart = sets["concatenate split"], sets["documents split"]
    assert whole.row_hash(0) == row_hash(whole.tokens(0), whole.document_offsets(0))
    assert apart.row_hash(0) == row_hash(apart.tokens(0), apart.document_offsets(0), within_documents=True)


def test_padding_and_prompts_are_not_counted_as_learned(sets: dict[str, SampleSet]) -> None:
    samples = sets["padded split"]
    by_hand = np.zeros(samples.vocab_size, np.int64)
    for i in samples.split("train"):
        for place in np.flatnonzero(samples.loss_mask(i)):
            by_hand[samples.tokens(i)[place + 1]] += 1
    assert np.array_equal(samples.token_counts("train", learned=True), by_hand)
    assert samples.token_counts("train").sum() == 30 * 48 > by_hand.sum()
