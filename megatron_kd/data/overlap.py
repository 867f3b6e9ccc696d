"""How much of a document other documents repeat, by 13-word shingles.

Thirteen words are the usual length for keeping training data out of evaluation data (GPT-3, Brown et al. 2020,
appendix C). Words are what white space separates, so re-wrapped and re-indented copies are found; in scripts that do
not separate words a shingle spans thirteen clauses and only longer copies are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

SHINGLE_WORDS = 13
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes modulo 2^64


def shingles(text: str) -> NDArray[np.uint64]:
    """64-bit hashes of all distinct runs of 13 words, sorted; of a shorter text one hash of the whole."""
    words = np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in text.split()], np.uint64)
    width = min(SHINGLE_WORDS, len(words))
    if not width:
        return words
    hashes = np.zeros(len(words) - width + 1, np.uint64)
    for offset in range(width):
        power = np.uint64(pow(_MULTIPLIER, offset, 2**64))
        hashes += words[offset : offset + len(hashes)] * power
    return np.unique(hashes)


def shared_fractions(
    candidates: Sequence[NDArray[np.uint64]], documents: Iterable[NDArray[np.uint64]]
) -> NDArray[np.float64]:
    """The fraction of each candidate's shingles that more than one of ``documents`` has: float64 [candidates].

    Args:
        candidates: shingles of some documents.
        documents: shingles of all documents, the candidates among them; read once, memory is that of the candidates.
    """
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *candidates]))
    seen = np.zeros(len(known), np.int64)
    for document in documents:
        places = np.searchsorted(known, document)
        places = places[places < len(known)]
        document = document[: len(places)]  # sorted: what lies behind the last known one is cut off
        seen[places[known[places] == document]] += 1
    fractions = [
        (seen[np.searchsorted(known, candidate)] > 1).mean() if len(candidate) else 1.0 for candidate in candidates
    ]
    return np.array(fractions, np.float64)
