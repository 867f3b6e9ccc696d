"""The rank table: vocabulary ids renumbered by how frequent they are.

Neighbouring slots of a row then hold numbers with few significant bits, which bit-shuffled zstd stores in about a
quarter less space than the ids themselves. Any permutation decodes exactly; a fitting one is only smaller.
"""

from __future__ import annotations

import numpy as np
import xxhash

from megatron_kd.errors import CacheError

UNUSED_RANK = 0xFFFFFFFF
UNUSED_ID = -1
_BLOCK = 256  # positions that are decoded at once


def build_rank_table(token_counts: np.ndarray, scored_ids: np.ndarray | None = None) -> np.ndarray:
    """The rank of every id, the most frequent id first, equal counts in the order of the ids.

    Args:
        token_counts: integers [V], how often each id occurs in the samples.
        scored_ids: integers of any shape, the top-K ids of some positions (−1 where unused). Given, ids are ordered
            by how often they occur there first: what is stored are the teacher's candidates, not the tokens, and a
            thousand positions tell enough.

    Returns:
        u32 [V], a permutation of 0 … V−1. The same input gives the same table on every machine.

    Raises:
        ValueError: for counts that are negative or not integers, for ids outside the vocabulary.
    """
    if token_counts.ndim != 1 or not len(token_counts) or token_counts.dtype.kind not in "iu":
        raise ValueError(f"token_counts must be integers [V], not {token_counts.dtype} {token_counts.shape}")
    if token_counts.min() < 0:
        raise ValueError(f"token_counts must not be negative: id {int(token_counts.argmin())} is")
    vocab_size = len(token_counts)
    scored = np.zeros(vocab_size, "i8")
    if scored_ids is not None:
        used = scored_ids[scored_ids != UNUSED_ID]
        if used.size and (used.min() < 0 or used.max() >= vocab_size):
            raise ValueError(f"scored_ids must lie in [-1, {vocab_size}), not [{used.min()}, {used.max()}]")
        scored = np.bincount(used, minlength=vocab_size)
    # max − count instead of −count, which would overflow for unsigned counts; lexsort is stable
    order = np.lexsort((token_counts.max() - token_counts, scored.max() - scored))
    table = np.empty(vocab_size, "<u4")
    table[order] = np.arange(vocab_size, dtype="<u4")
    return table


def rank_table_hash(table: np.ndarray) -> str:
    """xxh3_128 (32 hexadecimal digits) of the table as little-endian u32."""
    return xxhash.xxh3_128(np.ascontiguousarray(table, "<u4")).hexdigest()


def check_rank_table(table: np.ndarray, vocab_size: int) -> None:
    """Raises CacheError unless the table is a permutation of 0 … V−1."""
    if table.shape != (vocab_size,) or table.dtype.kind not in "iu":
        raise CacheError(
            f"the rank table is {table.dtype} {table.shape}; the vocabulary needs integers ({vocab_size},)"
        )
    if not np.array_equal(np.sort(table), np.arange(vocab_size)):
        raise CacheError("the rank table is not a permutation of the vocabulary: make it with build_rank_table")


class IdCoding:
    """Ids to ranks and back, with −1 ↔ 0xFFFFFFFF for unused slots."""

    def __init__(self, table: np.ndarray) -> None:
        """``table``: u32 [V], a permutation."""
        # One more entry at the end, which the index −1 of an unused id finds.
        self._rank_of_id = np.append(np.asarray(table, "<u4"), np.uint32(UNUSED_RANK))
        self._id_of_rank = np.full(len(table) + 1, UNUSED_ID, "<i4")
        self._id_of_rank[table] = np.arange(len(table), dtype="<i4")
        self._vocab_size = len(table)

    def encode(self, ids: np.ndarray) -> np.ndarray:
        """int32 [..., K] in [−1, V) → u32 [..., K]. Raises ValueError for other ids."""
        if ids.size and (ids.min() < UNUSED_ID or ids.max() >= self._vocab_size):
            raise ValueError(f"ids must lie in [-1, {self._vocab_size}), not [{ids.min()}, {ids.max()}]")
        return self._rank_of_id.take(ids, mode="wrap")  # several times faster than indexing

    def decode(self, ranks: np.ndarray) -> np.ndarray:
        """u32 [N, K] → int32 [N, K], −1 where unused: the same memory, which holds ranks no more.

        Raises ValueError for a rank that no id has.
        """
        ids = ranks.view("<i4")
        # In place and by blocks that stay in a core's cache: a new array costs a page fault every 4 KiB, together three
        # times the look-up itself.
        for start in range(0, len(ranks), _BLOCK):
            block = ranks[start : start + _BLOCK]
            if block.size and block.max() >= self._vocab_size:
                wrong = block[(block >= self._vocab_size) & (block != UNUSED_RANK)]
                if wrong.size:
                    raise ValueError(f"rank {int(wrong[0])} does not exist in a vocabulary of {self._vocab_size}")
            # clip sends the unused rank to the last entry, −1; take has copied its indices before it writes
            self._id_of_rank.take(block, mode="clip", out=ids[start : start + _BLOCK])
        return ids
