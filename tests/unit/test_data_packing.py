"""Packing: every token of every document once and in order, boundaries and masks right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_kd.data.packing import concatenate, labels_of

EOS = 0
documents = st.lists(st.lists(st.integers(1, 50), max_size=25), max_size=12)


@given(documents, st.integers(2, 17))
def test_every_token_once_in_order(docs: list[list[int]], seq_length: int) -> None:
    rows = list(concatenate((np.array(doc, np.int32) for doc in docs), seq_length, EOS))
    stream = [token for doc in docs if doc for token in [*doc, EOS]]
    assert len(rows) == len(stream) // seq_length
    assert [token for row in rows for token in row.tokens.tolist()] == stream[: len(rows) * seq_length]


@given(documents, st.integers(2, 17))
def test_offsets_and_masks_by_their_definition(docs: list[list[int]], seq_length: int) -> None:
    # The oracle numbers the document of each token of the stream.
    stream = [(token, number) for number, doc in enumerate(docs) if doc for token in [*doc, EOS]]
    for index, row in enumerate(concatenate((np.array(doc, np.int32) for doc in docs), seq_length, EOS)):
        numbers = [number for _, number in stream[index * seq_length : (index + 1) * seq_length]]
        starts = [i for i in range(seq_length) if i == 0 or numbers[i] != numbers[i - 1]]
        mask = [int(i + 1 < seq_length and numbers[i + 1] == numbers[i]) for i in range(seq_length)]
        assert row.document_offsets.tolist() == starts
        assert row.loss_mask.tolist() == mask
        assert (row.tokens.dtype, row.loss_mask.dtype, row.document_offsets.dtype) == (np.int32, np.uint8, np.int32)
        labels = labels_of(row.tokens, row.loss_mask)
        assert labels.tolist() == [row.tokens[i + 1] if mask[i] else -100 for i in range(seq_length)]


def test_an_example() -> None:
    rows = list(
        concatenate([np.array([5, 6], np.int32), np.array([7], np.int32), np.array([8, 9, 9], np.int32)], 4, EOS)
    )
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 0, 7], [0, 8, 9, 9]]
    assert [row.document_offsets.tolist() for row in rows] == [[0, 3], [0, 1]]
    assert [row.loss_mask.tolist() for row in rows] == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert labels_of(rows[1].tokens, rows[1].loss_mask).tolist() == [-100, 9, 9, -100]


def test_rows_do_not_share_memory() -> None:
    first, second = concatenate([np.arange(1, 9, dtype=np.int32)], 4, EOS)
    second.tokens[:] = -7
    assert first.tokens.tolist() == [1, 2, 3, 4]


def test_streams() -> None:
    taken = 0

    def endless() -> Iterator[NDArray[np.int32]]:
        nonlocal taken
        while True:
            taken += 1
            yield np.ones(3, np.int32)

    rows = concatenate(endless(), 8, EOS)
    next(rows)
    assert taken == 2


def test_labels_of_batches_and_refusals() -> None:
    tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    mask = np.array([[1, 1, 0], [0, 1, 0]], np.uint8)
    labels = labels_of(tokens, mask)
    assert labels.dtype == np.int32
    assert labels.tolist() == [[2, 3, -100], [-100, 6, -100]]
    with pytest.raises(ValueError, match="last position"):
        labels_of(tokens, np.ones_like(mask))
    with pytest.raises(ValueError, match="shape"):
        labels_of(tokens, mask[:, :2])
    with pytest.raises(ValueError, match="at least 2"):
        list(concatenate([], 1, EOS))
