"""One sample of the cache: its tokens and the teacher's top-K distribution after each of them.

Legend: L positions of the row, K slots per position, D documents, E temperatures beyond the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from megatron_kd.cache.identity import row_hash
from megatron_kd.cache.values import to_patterns
from megatron_kd.errors import CacheError


def _no_extra() -> np.ndarray:
    return np.empty((0, 0), "<f4")


@dataclass(frozen=True, eq=False)
class Row:
    """A whole row (``start`` 0), or the positions from ``start`` on that ``read_slice`` was asked for.

    Position n holds the distribution of the token after position n, so nothing has to be shifted.

    Attributes:
        sample_id: the number of the sample, and of the row.
        tokens: int32 [L].
        loss_mask: uint8 [L], 1 where the position counts in the loss.
        document_offsets: int32 [D], where documents start in the whole row; the first is 0, they rise.
        ids: int32 [L, K], distinct within a position, −1 where unused (only at the end).
        logprobs: float16 or float32 [L, K], natural logarithms at the cache's first temperature, descending, ≤ 0,
            −inf where unused.
        tail_logmass: float32 [L], log of the probability outside ``ids`` at that temperature; −inf for none.
        log_normalizers: float32 [E, L]. With the first temperature T0 and another T over the whole vocabulary:
            log Σ_v p_T0(v)^(T0/T), so that log p_T(v) = (T0/T)·log p_T0(v) − log_normalizer exactly.
        tail_logmass_extra: float32 [E, L], log of the probability outside ``ids`` at each extra temperature.
        start: the position of the first element.
        within_documents: whether a token saw its own document alone, from position 0 on, or all before it in the row.
    """

    sample_id: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    document_offsets: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    tail_logmass: np.ndarray
    log_normalizers: np.ndarray = field(default_factory=_no_extra)
    tail_logmass_extra: np.ndarray = field(default_factory=_no_extra)
    start: int = 0
    within_documents: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> bytes:
        """``row_hash`` of tokens, documents and what tokens saw. Only for a whole row."""
        return row_hash(self.tokens, self.document_offsets, self.within_documents)


def content_hash(row: Row, value_dtype: str) -> str:
    """xxh3_128 of what a whole row decodes to: ids i32, logprobs as stored patterns, tail, extras, loss mask.

    The arrays follow each other in C order, little-endian, extras per temperature as normalizer then tail.
    """
    state = xxhash.xxh3_128(np.ascontiguousarray(row.ids, "<i4"))
    state.update(to_patterns(row.logprobs, value_dtype))
    state.update(np.ascontiguousarray(row.tail_logmass, "<f4"))
    for normalizer, tail in zip(row.log_normalizers, row.tail_logmass_extra, strict=True):
        state.update(np.ascontiguousarray(normalizer, "<f4"))
        state.update(np.ascontiguousarray(tail, "<f4"))
    state.update(np.ascontiguousarray(row.loss_mask, "u1"))
    return state.hexdigest()


def check_row(row: Row, *, vocab_size: int, top_k: int, extra_temperatures: int) -> None:
    """Refuses a row that is not as ``Row`` describes it, but for the sums of ``mass.py``.

    Raises:
        CacheError: naming the sample, the position and the fault.
    """
    _check_shapes(row, top_k, extra_temperatures)
    fault = _tokens_fault(row, vocab_size) or _slots_fault(row, vocab_size) or _duplicate_fault(row)
    if fault:
        raise CacheError(f"sample {row.sample_id} is not a row of this cache: {fault}")


def _check_shapes(row: Row, top_k: int, extras: int) -> None:
    length = len(row.tokens)
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "tokens": ((length,), ("int32",)),
        "loss_mask": ((length,), ("uint8",)),
        "ids": ((length, top_k), ("int32",)),
        "logprobs": ((length, top_k), ("float16", "float32")),
        "tail_logmass": ((length,), ("float32",)),
        "document_offsets": ((len(row.document_offsets),), ("int32",)),
    }
    if extras or row.log_normalizers.size or row.tail_logmass_extra.size:
        wanted["log_normalizers"] = wanted["tail_logmass_extra"] = ((extras, length), ("float32",))
    for name, (shape, dtypes) in wanted.items():
        array = getattr(row, name)
        if array.shape != shape or array.dtype.name not in dtypes:
            raise CacheError(
                f"sample {row.sample_id} is not a row of this cache: {name} is {array.dtype.name} {array.shape}, "
                f"this cache needs {' or '.join(dtypes)} {shape}"
            )
    if length == 0 or row.start != 0:
        raise CacheError(f"sample {row.sample_id} is not a whole row with at least one token")


def _first(bad: np.ndarray) -> int:
    """The position of the first offender in a boolean [L] or [L, K]."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(-1)))


def _tokens_fault(row: Row, vocab_size: int) -> str:
    offsets = row.document_offsets
    if not len(offsets) or offsets[0] != 0 or (np.diff(offsets) <= 0).any() or offsets[-1] >= len(row):
        return f"document_offsets must start at 0 and rise below {len(row)}, not {offsets[:8].tolist()} …"
    if row.tokens.min() < 0 or row.tokens.max() >= vocab_size:
        where = _first((row.tokens < 0) | (row.tokens >= vocab_size))
        return f"token {row.tokens[where]} at position {where} is outside the vocabulary of {vocab_size}"
    if row.loss_mask.max() > 1:
        return f"loss_mask is {row.loss_mask.max()} at position {int(row.loss_mask.argmax())}, must be 0 or 1"
    return ""


def _surely_descending(logprobs: np.ndarray) -> bool:
    """Whether all are < 0 (or −0), descend and are numbers; by bit patterns, float16 comparisons being slow."""
    bits = np.ascontiguousarray(logprobs).view(f"u{logprobs.itemsize}")
    infinite = np.array(-np.inf, logprobs.dtype).view(bits.dtype)
    sign = 1 << (8 * logprobs.itemsize - 1)
    return bool((bits[:, 0] >= sign).all() and (bits[:, -1] <= infinite).all() and (bits[:, 1:] >= bits[:, :-1]).all())


def _slots_fault(row: Row, vocab_size: int) -> str:
    ids, logprobs = row.ids, row.logprobs
    if ids.min() < -1 or ids.max() >= vocab_size:
        return f"an id at position {_first((ids < -1) | (ids >= vocab_size))} is outside [-1, {vocab_size})"
    if not _surely_descending(logprobs):
        # Written so that NaN fails the comparison.
        if not (logprobs[:, 0] <= 0).all():
            return f"the largest log-probability at position {_first(~(logprobs[:, 0] <= 0))} is above 0 or NaN"
        descending = logprobs[:, 1:] <= logprobs[:, :-1]
        if not descending.all():
            return (
                f"log-probabilities at position {_first(~descending)} do not descend (or are NaN): sort them with ids"
            )
    if ids.min() < 0:
        unused = ids < 0
        if (logprobs[unused] != -np.inf).any():
            return f"an unused slot (id -1) at position {_first(unused & (logprobs != -np.inf))} has a log-probability"
        if (unused[:, :-1] & ~unused[:, 1:]).any():
            return f"position {_first(unused[:, :-1] & ~unused[:, 1:])} has an unused slot before a used one"
    for name in ("tail_logmass", "tail_logmass_extra"):
        tails = getattr(row, name).reshape(-1, len(row))
        if not (tails <= 0).all():
            return f"{name} at position {_first(~(tails <= 0).T)} is above 0 or NaN"
    if row.log_normalizers.size and not np.isfinite(row.log_normalizers).all():
        return f"log_normalizers at position {_first(~np.isfinite(row.log_normalizers).T)} is not finite"
    return ""


def _duplicate_fault(row: Row) -> str:
    ordered = np.sort(row.ids, -1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return f"position {_first(twice)} names an id twice" if twice.any() else ""
