"""Whole documents to rows, none of which sees another: ``documents`` and ``padded``. L row length, n tokens.

A row is filled up with padding, which is a document of its own behind the last: nothing sees it and it trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_kd.data.names import Truncation
from megatron_kd.data.packing import PackedRow

WINDOW_ROWS = 64
"""Documents of so many rows are placed together: at most one row in about as many is left ill filled by it."""


@dataclass(frozen=True)
class Document:
    """A document, or a piece of one.

    Attributes:
        tokens: int32 [n].
        learned: bool [n], where the token is one that the model shall learn to predict.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)


def pieces(document: Document, seq_length: int, truncation: Truncation) -> list[Document]:
    """What of a document goes into rows, each at most ``seq_length`` long: itself where it fits.

    Args:
        truncation: of a longer one: ``split`` cuts it into pieces, each a document of its own; ``truncate`` keeps its
            first tokens; ``drop`` leaves it out.

    Returns:
        Pieces that have a token to learn behind their first; the others would train nothing and are left out.
    """
    if len(document) > seq_length and truncation == "drop":
        return []
    stop = min(len(document), seq_length) if truncation == "truncate" else len(document)
    parts = (slice(start, min(start + seq_length, stop)) for start in range(0, stop, seq_length))
    cut = (Document(document.tokens[part], document.learned[part]) for part in parts)
    return [piece for piece in cut if piece.learned[1:].any()]


def pack_documents(
    documents: Iterable[Document], seq_length: int, pad_id: int, truncation: Truncation
) -> Iterator[PackedRow]:
    """Rows of whole documents, first fit decreasing within windows of about ``WINDOW_ROWS`` rows of tokens.

    Within a row documents keep their order, rows come in the order of their first documents: what is taken of the
    first rows is no choice of long documents.
    """
    window: list[Document] = []
    tokens = 0
    for document in documents:
        for piece in pieces(document, seq_length, truncation):
            window.append(piece)
            tokens += len(piece)
        if tokens >= WINDOW_ROWS * seq_length:
            yield from _packed(window, seq_length, pad_id)
            window, tokens = [], 0
    yield from _packed(window, seq_length, pad_id)


def pad_documents(
    documents: Iterable[Document], seq_length: int, pad_id: int, truncation: Truncation
) -> Iterator[PackedRow]:
    """One document, or piece of one, a row."""
    for document in documents:
        for piece in pieces(document, seq_length, truncation):
            yield _row([piece], seq_length, pad_id)


def first_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which items share a bin of ``size``: each list ascending, lists by their first item.

    Args:
        lengths: from 1 to ``size``.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    free = np.empty(len(lengths), np.int64)
    bins: list[list[int]] = []
    for item in order:
        length, opened = lengths[item], len(bins)
        fits = free[:opened] >= length
        place = int(fits.argmax()) if opened else 0
        if not opened or not fits[place]:
            place = opened
            bins.append([])
            free[place] = size
        bins[place].append(item)
        free[place] -= length
    return sorted(sorted(items) for items in bins)


def _packed(window: Sequence[Document], seq_length: int, pad_id: int) -> Iterator[PackedRow]:
    for items in first_fit_decreasing([len(piece) for piece in window], seq_length):
        yield _row([window[item] for item in items], seq_length, pad_id)


def _row(parts: Sequence[Document], seq_length: int, pad_id: int) -> PackedRow:
    tokens = np.full(seq_length, pad_id, np.int32)
    loss_mask = np.zeros(seq_length, np.uint8)
    offsets, at = [], 0
    for part in parts:
        offsets.append(at)
        tokens[at : at + len(part)] = part.tokens
        # The last position of a document has nothing to predict.
        loss_mask[at : at + len(part) - 1] = part.learned[1:]
        at += len(part)
    if at < seq_length:
        offsets.append(at)
    return PackedRow(tokens, loss_mask, np.array(offsets, np.int32))
