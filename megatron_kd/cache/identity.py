"""What a row is: one hash over its tokens and its document boundaries.

The teacher's answer depends on the tokens and on what each of them sees: all before it in the row, or its own document
alone. Which of the two is hashed with the tokens and with where documents start, so that the answers of one are never
taken for those of the other. The loss mask is left out because it does not change the teacher.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import xxhash

ROW_HASH_VERSION = 1
WITHIN_DOCUMENTS_VERSION = 2
_HASH = re.compile("[0-9a-f]{32}")


def is_hash(value: Any) -> bool:
    """Whether it is a hash as text: 32 hexadecimal digits."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def row_hash(tokens: np.ndarray, document_offsets: np.ndarray, within_documents: bool = False) -> bytes:
    """The 16 bytes of xxh3_128(version as u32 ‖ tokens as i32 ‖ document offsets as i32), all little-endian.

    The version is 1 where a token sees the whole row before it, 2 where it sees its own document alone.

    Offsets start at 0 and rise, so the last 0 that only larger numbers follow marks where they begin: the two parts
    cannot be confused and need no length.

    Args:
        tokens: integers [L], below 2^31.
        document_offsets: integers [D], the positions at which documents start; the first is 0.

    Raises:
        ValueError: for an array that is not one-dimensional or not of integers.
    """
    for name, array in (("tokens", tokens), ("document_offsets", document_offsets)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{name} must be integers in one dimension, not {array.dtype} {array.shape}")
    version = WITHIN_DOCUMENTS_VERSION if within_documents else ROW_HASH_VERSION
    state = xxhash.xxh3_128(version.to_bytes(4, "little"))
    state.update(np.ascontiguousarray(tokens, "<i4"))
    state.update(np.ascontiguousarray(document_offsets, "<i4"))
    return state.digest()


def first_difference(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """The first position at which two sequences differ (the shorter one's end counts), None where they are equal."""
    shared = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shared] != theirs[:shared])
    if len(differing):
        return int(differing[0])
    return None if len(ours) == len(theirs) else shared
