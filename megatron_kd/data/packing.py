"""Documents to rows of equal length. L row length.

Position i of a row predicts token i + 1 of the same row. ``loss_mask`` is 1 where that prediction trains. The last
position has no label in its row, and the token behind the end of a document belongs to another one: both are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedRow:
    """One training sample.

    Attributes:
        tokens: int32 [L].
        loss_mask: uint8 [L], 1 where the prediction of the next token trains.
        document_offsets: int32 [documents], where each document (or the rest of one) begins; the first is 0.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    document_offsets: NDArray[np.int32]


def concatenate(documents: Iterable[NDArray[np.int32]], seq_length: int, eos_id: int) -> Iterator[PackedRow]:
    """Joins documents, each with ``eos_id`` behind it, and cuts the stream into rows of ``seq_length`` tokens.

    Long documents go on in the next row. Empty documents are left out, and so is what is left at the end and does
    not fill a row. Attention crosses documents within a row; only the prediction across the boundary is masked.

    Args:
        documents: token ids, int32 [n] each, without EOS.

    Raises:
        ValueError: for a row of fewer than two tokens, which has nothing to predict.
    """
    if seq_length < 2:
        raise ValueError(f"seq_length must be at least 2, not {seq_length}")
    tokens = np.empty(seq_length, np.int32)
    offsets: list[int] = []
    filled = 0
    for document in documents:
        if not len(document):
            continue
        rest = np.append(np.asarray(document, np.int32), np.int32(eos_id))
        while len(rest):
            taken = min(len(rest), seq_length - filled)
            tokens[filled : filled + taken] = rest[:taken]
            offsets.append(filled)
            rest = rest[taken:]
            filled += taken
            if filled == seq_length:
                yield _row(tokens, offsets)
                tokens, offsets, filled = np.empty(seq_length, np.int32), [], 0


def _row(tokens: NDArray[np.int32], offsets: list[int]) -> PackedRow:
    document_offsets = np.array(offsets, np.int32)
    loss_mask = np.ones(len(tokens), np.uint8)
    loss_mask[document_offsets - 1] = 0  # offset 0 stands for the last position of the row
    return PackedRow(tokens, loss_mask, document_offsets)


def labels_of(tokens: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The token each position predicts: int32 [..., L], −100 where ``loss_mask`` is 0.

    Args:
        tokens: int32 [..., L].
        loss_mask: [..., L]; its last position must be 0.

    Raises:
        ValueError: where the shapes differ or a last position is not masked, since its label is in no row.
    """
    tokens, mask = np.asarray(tokens), np.asarray(loss_mask).astype(bool)
    if tokens.shape != mask.shape:
        raise ValueError(f"tokens {tokens.shape} and loss_mask {mask.shape} differ in shape")
    if mask[..., -1].any():
        raise ValueError("the last position of a row has no next token, its loss_mask must be 0")
    labels = np.full(tokens.shape, IGNORE_INDEX, np.int32)
    labels[..., :-1] = np.where(mask[..., :-1], tokens[..., 1:], IGNORE_INDEX)
    return labels
