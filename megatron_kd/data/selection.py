"""Which documents are held out and which train.

Whole documents are shared out, never rows: a row of the held-out split must not go on in training. The choice is
pseudo-random, by a hash of the seed and the text, and so does not depend on the order of the corpus. A document whose
passages other documents repeat is not held out (``overlap.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_kd.data.conversation import Conversation, text_of
from megatron_kd.data.npy import NpyWriter
from megatron_kd.data.overlap import shared_fractions, shingles
from megatron_kd.data.packing_rule import PackingRule
from megatron_kd.data.sampler import splitmix64
from megatron_kd.errors import DataError

MAX_OVERLAP = 0.01  # of a held-out document's shingles
MAX_SHARE = 4  # a held-out document fills at most a quarter of the split where there are enough smaller ones
_CANDIDATES = 16  # times the tokens that are held out: so many are examined, since some will be refused
_BATCH_CHARACTERS = 2**20

Encode = Callable[[Any], list[NDArray[np.int32]]]  # ``encode_batch`` of a tokenizer
Advance = Callable[[str], None]  # called with each text that was worked on


@dataclass(frozen=True)
class Scan:
    """The tokenised documents of a corpus, or of its beginning.

    Attributes:
        tokens: int32 [total], memory-mapped, documents one behind the other, without EOS; see ``PackingRule``.
        starts: int64 [documents + 1].
        priorities: uint64 [documents], the pseudo-random order.
        complete: whether the corpus ends here.
        rule: what becomes of them.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    priorities: NDArray[np.uint64]
    complete: bool
    rule: PackingRule

    def __len__(self) -> int:
        return len(self.priorities)

    @property
    def packed_lengths(self) -> NDArray[np.int64]:
        """Tokens each document takes in rows, its EOS included; 0 for an empty one."""
        return self.rule.taken(np.diff(self.starts))

    def documents(self, indices: Iterable[int]) -> Iterator[NDArray[np.int32]]:
        """The tokens of some documents, in the order of ``indices``."""
        return (self.tokens[self.starts[i] : self.starts[i + 1]] for i in indices)


def scan(
    documents: Iterable[str | Conversation],
    encode: Encode,
    file: Path,
    rule: PackingRule,
    *,
    seed: int,
    enough: int | None,
    advance: Advance,
) -> Scan:
    """Tokenises documents into a new ``file`` until ``enough`` tokens are there (None: all of them)."""
    starts, priorities = array("q", [0]), array("Q")
    complete = True
    with NpyWriter(file, np.dtype(np.int32)) as writer:
        for batch in _batches(documents):
            if enough is not None and writer.rows >= enough:
                complete = False
                break
            ids = encode(batch)
            for text, tokens in zip(map(text_of, batch), ids, strict=True):
                priorities.append(xxhash.xxh3_64_intdigest(text.encode(), seed=seed))
                starts.append(starts[-1] + len(tokens))
                advance(text)
            writer.append(np.concatenate(ids))
    tokens = np.load(file, mmap_mode="r" if starts[-1] else None)
    return Scan(np.asarray(tokens), np.array(starts, np.int64), np.array(priorities, np.uint64), complete, rule)


@dataclass(frozen=True)
class Choice:
    """Document indices in the order in which they are packed, int64 each."""

    train: NDArray[np.int64]
    heldout: NDArray[np.int64]


def choose(scanned: Scan, read: Callable[[], Iterator[str]], heldout_tokens: int, advance: Advance) -> Choice:
    """Shares out the scanned documents: all of them train but those that are held out.

    Args:
        scanned: the documents as tokens.
        read: gives the same documents as text, from the beginning; called only where something is held out.
        heldout_tokens: at least so many are held out, EOS included.
        advance: called with each text that was compared.

    Raises:
        DataError: where the documents that no other repeats hold too few tokens.
    """
    heldout = _choose_heldout(scanned, read, heldout_tokens, advance) if heldout_tokens else np.empty(0, np.int64)
    # Another order than that of the candidates, or training would begin with those that were refused.
    order = np.argsort(splitmix64(scanned.priorities), kind="stable")
    return Choice(train=order[~np.isin(order, heldout)], heldout=heldout)


def _choose_heldout(
    scanned: Scan, read: Callable[[], Iterator[str]], wanted: int, advance: Advance
) -> NDArray[np.int64]:
    lengths = scanned.packed_lengths
    order = np.argsort(scanned.priorities, kind="stable")
    order = order[lengths[order] > 0]
    small = lengths[order] <= wanted // MAX_SHARE
    order = np.concatenate([order[small], order[~small]])
    examined, factor = 0, _CANDIDATES
    while True:
        examined = _first_with(lengths[order], factor * wanted)
        candidates = order[:examined]
        alone = candidates[_overlaps(candidates, len(scanned), read, advance) <= MAX_OVERLAP]
        if lengths[alone].sum() >= wanted:
            return alone[: _first_with(lengths[alone], wanted)]
        if examined == len(order):
            break
        factor *= _CANDIDATES
    raise DataError(
        f"{wanted} tokens are to be held out, but the documents that share no long passage with others hold only "
        f"{lengths[alone].sum()} ({len(alone)} of {len(order)} documents): lower data.heldout_tokens or add documents"
    )


def _overlaps(
    candidates: NDArray[np.int64], documents: int, read: Callable[[], Iterator[str]], advance: Advance
) -> NDArray[np.float64]:
    chosen = set(candidates.tolist())
    by_index = {i: shingles(text) for i, text in enumerate(islice(read(), documents)) if i in chosen}

    def all_shingles() -> Iterator[NDArray[np.uint64]]:
        for text in islice(read(), documents):
            advance(text)
            yield shingles(text)

    return shared_fractions([by_index[i] for i in candidates.tolist()], all_shingles())


def _first_with(lengths: NDArray[np.int64], tokens: int) -> int:
    """How many of the first documents hold ``tokens`` tokens; all of them where there are fewer."""
    return min(int(np.searchsorted(np.cumsum(lengths), tokens)) + 1, len(lengths))


def _batches(documents: Iterable[str | Conversation]) -> Iterator[list[str | Conversation]]:
    """Lists of about 1 MiB of text: enough for every thread of the tokenizer, little enough to hold."""
    batch: list[str | Conversation] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(text_of(document))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
