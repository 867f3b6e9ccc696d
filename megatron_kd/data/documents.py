"""Which document each position of a row belongs to, and its place there. b rows, s positions of a whole row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def document_numbers(offsets: Sequence[NDArray[np.int32]], length: int) -> NDArray[np.int32]:
    """The number of its document for each position, from 0 in each row: int32 [b, length].

    Args:
        offsets: for each row where its documents begin; those at ``length`` or behind it do not count.
    """
    numbers = np.zeros((len(offsets), length), np.int32)
    for row, starts in zip(numbers, offsets, strict=True):
        row[starts[(starts > 0) & (starts < length)]] = 1
    return np.cumsum(numbers, axis=1, dtype=np.int32)


def restarted_positions(documents: Tensor) -> Tensor:
    """int64 [b, s], counted from 0 in each document, without a device sync.

    Args:
        documents: integers [b, s], equal within a document and unlike in neighbouring ones.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values
