"""Turns a row as another system stored it into a row of ours: sorted, padded, with a tail.

Legend: L positions of the sample, P positions that the source scored (L or L − 1), K' slots there, K slots here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_kd.cache.importers.source import Samples, SourceRow
from megatron_kd.cache.mass import TAIL_FLOOR, check_mass
from megatron_kd.cache.row import Row, check_row
from megatron_kd.cache.values import from_patterns, to_patterns
from megatron_kd.errors import CacheError

UNUSED_BELOW = -999.0
"""Log-probabilities down here are the mark of an unused slot (−1000, −10000, −inf); as a probability they are 0."""
LOSSY_EXCESS = 0.05
"""How far an approximated distribution may add up beyond 1 before it is taken for damage."""


@dataclass(frozen=True, eq=False)
class Converted:
    """A row of ours, and what had to be done to it: positions scaled down to a sum of 1, tails set to the floor."""

    row: Row
    scaled: int
    floored: int


def convert(
    sample: int, found: SourceRow, samples: Samples, *, top_k: int, vocab_size: int, value_dtype: str, lossy: bool
) -> Converted:
    """The row of one sample.

    Slots are put in descending order and unused ones at the end; the tail is log1p(−Σp) of the values as they will be
    stored, in float64, at least log ``TAIL_FLOOR`` and −inf where every id of the vocabulary is kept. A last position
    that the source did not score gets no ids, tail log 1 and loss mask 0.

    Args:
        lossy: scale positions that add up to more than 1 down instead of refusing them, up to ``LOSSY_EXCESS``.

    Raises:
        CacheError: naming file, sample and position, for anything that is no distribution over this vocabulary.
    """
    tokens = samples.tokens(sample)
    length, positions = len(tokens), len(found.ids)
    try:
        if positions not in (length, length - 1):
            raise CacheError(f"sample {sample} has {length} tokens, the source scored {positions} positions")
        ids, values = _ordered(sample, found, vocab_size)
        values, scaled = _scaled(sample, values, lossy)
        ids, logprobs = _padded(ids, values, length, top_k, value_dtype)
        tail, floored = _tail(ids, logprobs, positions, vocab_size)
        mask = np.array(samples.loss_mask(sample), "u1")
        mask[positions:] = 0
        row = Row(
            sample_id=sample,
            tokens=np.array(tokens, "i4"),
            loss_mask=mask,
            document_offsets=np.array(samples.document_offsets(sample), "i4"),
            ids=ids,
            logprobs=logprobs,
            tail_logmass=tail,
        )
        check_row(row, vocab_size=vocab_size, top_k=top_k, extra_temperatures=0)
        check_mass(row, (1.0,), value_dtype)
    except CacheError as error:
        raise CacheError(f"{found.where}: {error}") from error
    return Converted(row, scaled, floored)


def _ordered(sample: int, found: SourceRow, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 and values float64 [P, K'], descending, −1 and −inf in unused slots."""
    ids, values = found.ids, found.logprobs.astype("f8")
    if np.isnan(values).any() or (values == np.inf).any():
        wrong = (np.isnan(values) | (values == np.inf)).any(-1)
        raise CacheError(f"sample {sample}: a log-probability at position {int(wrong.argmax())} is NaN or infinite")
    unused = values <= UNUSED_BELOW
    if unused.all(-1).any():
        raise CacheError(f"sample {sample}: position {int(unused.all(-1).argmax())} holds no probability at all")
    outside = (ids >= vocab_size) & ~unused
    if outside.any():
        where = int(outside.any(-1).argmax())
        raise CacheError(
            f"sample {sample}: id {int(ids[where][outside[where]][0])} at position {where} is outside the vocabulary "
            f"of {vocab_size}: give the teacher's as --vocab-size, or these are another teacher's rows"
        )
    ids, values = np.where(unused, -1, ids).astype("i4"), np.where(unused, -np.inf, values)
    if (values[:, 1:] > values[:, :-1]).any():
        order = np.argsort(-values, axis=-1, kind="stable")
        ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
    return ids, values


def _scaled(sample: int, values: np.ndarray, lossy: bool) -> tuple[np.ndarray, int]:
    """The values with sums above 1 mended, and at how many positions."""
    if not lossy:
        # A logarithm of the softmax of float32 may come out a rounding above 0; more than that fails the sum's check.
        return np.minimum(values, 0.0), 0
    mass = np.exp(values).sum(-1)
    excess = mass > 1
    if (mass > 1 + LOSSY_EXCESS).any():
        where = int((mass > 1 + LOSSY_EXCESS).argmax())
        raise CacheError(
            f"sample {sample}: the probabilities of position {where} add up to {mass[where]:.4g}; compression makes "
            f"at most {1 + LOSSY_EXCESS:g} of 1: the file is damaged or its settings are those of another"
        )
    return np.where(excess[:, None], values - np.log(np.where(excess, mass, 1.0))[:, None], values), int(excess.sum())


def _padded(
    ids: np.ndarray, values: np.ndarray, length: int, top_k: int, value_dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 and logprobs [L, K] as the cache will give them back."""
    positions, slots = ids.shape
    if slots > top_k:
        raise CacheError(f"{slots} slots a position, the source said at most {top_k}")
    all_ids = np.full((length, top_k), -1, "i4")
    all_values = np.full((length, top_k), -np.inf, "f4")
    all_ids[:positions, :slots] = ids
    all_values[:positions, :slots] = values
    return all_ids, np.ascontiguousarray(from_patterns(to_patterns(all_values, value_dtype), value_dtype))


def _tail(ids: np.ndarray, logprobs: np.ndarray, positions: int, vocab_size: int) -> tuple[np.ndarray, int]:
    """float32 [L], and how many tails were set to the floor."""
    mass = np.exp(logprobs.astype("f8")).sum(-1)
    whole = (ids >= 0).sum(-1) == vocab_size
    floored = (mass > 1 - TAIL_FLOOR) & ~whole
    tail = np.log1p(-np.minimum(mass, 1 - TAIL_FLOOR))
    tail[whole] = -np.inf
    tail[positions:] = 0.0
    return tail.astype("f4"), int(floored.sum())
