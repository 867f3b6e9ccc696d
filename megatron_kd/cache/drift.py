"""How far two captures of the same rows are apart: two engines, two precisions, two versions of a library.

Legend: L positions, K slots per position (the smaller of the two), C ids that both have at a position.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_kd.cache.manifest import CacheManifest, first_differing_field
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, committed_shards, open_cache
from megatron_kd.cache.values import ROUNDING
from megatron_kd.errors import CacheError
from megatron_kd.progress import progress


@dataclass(frozen=True)
class RowDrift:
    """What two captures of one row say, position by position.

    Attributes:
        kl: float64 [L], see ``row_drift``.
        same_top1: bool [L], whether the likeliest token is the same.
        ids_differing: int64 [L], ids of one that the other does not have among its K.
        position: int64 [C of all positions], where each common id stands.
        difference: float64 [C of all positions], log p_b − log p_a of each common id.
        beyond_rounding: float64, the same shape: |difference| less what storage may have rounded.
    """

    kl: NDArray[np.float64]
    same_top1: NDArray[np.bool_]
    ids_differing: NDArray[np.int64]
    position: NDArray[np.int64]
    difference: NDArray[np.float64]
    beyond_rounding: NDArray[np.float64]


def row_drift(a: Row, b: Row, dtype_a: str = "float32", dtype_b: str = "float32") -> RowDrift:
    """Compares two captures of one row at the temperature of their log-probabilities.

    ``kl`` is KL(a ‖ b) in nats over the common ids, with all other tokens as one outcome: a lower bound of the KL over
    the vocabulary. Both are divided by their sums first, which takes off the rounding of stored values; so it is
    never negative.

    Args:
        dtype_a, dtype_b: in which the values were stored, see ``ROUNDING``.

    Raises:
        ValueError: rows of different lengths.
    """
    length = len(a)
    if len(b) != length:
        raise ValueError(f"rows of {length} and {len(b)} positions")
    k = min(a.ids.shape[1], b.ids.shape[1])
    slots = [_slots(row, k) for row in (a, b)]
    vocab = 1 + max(int(ids.max(initial=0)) for _, ids, _ in slots)
    keys_a, keys_b = (position * vocab + ids for position, ids, _ in slots)
    common, *chosen = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    position = common // vocab
    (la, pa, rest_a), (lb, pb, rest_b) = (
        _outcomes(row, k, slot, index, length) for row, slot, index in zip((a, b), slots, chosen, strict=True)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = pa * (la - lb)
        # A rest that a holds impossible adds nothing, whatever b says of it.
        rest = np.where(rest_a > 0, rest_a * (np.log(rest_a) - np.log(rest_b)), 0.0)
        difference = lb - la
        sum_a = np.bincount(position, pa, length) + rest_a
        sum_b = np.bincount(position, pb, length) + rest_b
        kl = (np.bincount(position, terms, length) + rest) / sum_a + np.log(sum_b) - np.log(sum_a)
        rounding = -ROUNDING[dtype_a] * la - ROUNDING[dtype_b] * lb
        beyond = np.maximum(np.abs(difference) - rounding, 0.0)
    counts = [np.bincount(slot_position, minlength=length) for slot_position, _, _ in slots]
    return RowDrift(
        kl=np.maximum(kl, 0.0),
        same_top1=a.ids[:, 0] == b.ids[:, 0],
        ids_differing=np.maximum(*counts) - np.bincount(position, minlength=length),
        position=position,
        difference=difference,
        beyond_rounding=beyond,
    )


_Slots = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def _slots(row: Row, k: int) -> _Slots:
    """Position, id and log-probability of the first k slots, but for those that are unused or hold no probability."""
    used = (row.ids[:, :k] >= 0) & (row.logprobs[:, :k] > -np.inf)
    return np.nonzero(used)[0], row.ids[:, :k][used].astype("i8"), row.logprobs[:, :k][used].astype("f8")


def _outcomes(
    row: Row, k: int, slots: _Slots, chosen: NDArray[np.int64], length: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Log-probability and probability of the chosen slots, and the probability [L] of everything else."""
    position, _, logprobs = slots
    others = np.ones(len(position), bool)
    others[chosen] = False
    cut = np.exp(row.logprobs[:, k:].astype("f8")).sum(axis=1)
    rest = np.exp(row.tail_logmass.astype("f8")) + cut
    rest += np.bincount(position[others], np.exp(logprobs[others]), length)
    return logprobs[chosen], np.exp(logprobs[chosen]), rest


@dataclass(frozen=True)
class DriftReport:
    """The drift over some rows, in nats where it is not a share or a count.

    Attributes:
        kl_mean, kl_max: of KL(a ‖ b) over positions, see ``row_drift``.
        logprob_mean, logprob_max: of |log p_b − log p_a| over common ids.
        logprob_max_beyond_rounding: the largest of them less what the storage of both may have rounded.
        top1_agreement: share of positions with the same likeliest token.
        ids_differing_mean, ids_differing_max: ids of a position that only one of the two has.
        worst_sample, worst_position: where ``kl_max`` was seen.
        teachers_differ_in: the first field, with both values, in which the teachers' identities differ.
    """

    rows: int
    positions: int
    kl_mean: float
    kl_max: float
    logprob_mean: float
    logprob_max: float
    logprob_max_beyond_rounding: float
    top1_agreement: float
    ids_differing_mean: float
    ids_differing_max: int
    worst_sample: int
    worst_position: int
    teachers_differ_in: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """A line for each figure."""
        return "\n".join(f"{name:28} {_shown(value)}" for name, value in self.to_dict().items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class DriftSums:
    """Collects rows into a report; memory does not grow with them."""

    def __init__(self) -> None:
        self._rows = self._positions = self._values = 0
        self._kl = self._difference = self._top1 = self._ids = 0.0
        self._kl_max, self._difference_max, self._beyond_max, self._ids_max = -1.0, 0.0, 0.0, 0
        self._worst = (-1, -1)

    def add(self, sample: int, drift: RowDrift) -> None:
        """Counts one row in."""
        absolute = np.abs(drift.difference)
        self._rows += 1
        self._positions += len(drift.kl)
        self._values += len(absolute)
        self._kl += float(drift.kl.sum())
        self._difference += float(absolute.sum())
        self._top1 += float(drift.same_top1.sum())
        self._ids += float(drift.ids_differing.sum())
        self._difference_max = max(self._difference_max, float(absolute.max(initial=0.0)))
        self._beyond_max = max(self._beyond_max, float(drift.beyond_rounding.max(initial=0.0)))
        self._ids_max = max(self._ids_max, int(drift.ids_differing.max()))
        where = int(drift.kl.argmax())
        if drift.kl[where] > self._kl_max:
            self._kl_max, self._worst = float(drift.kl[where]), (sample, where)

    def report(self, teachers_differ_in: str | None = None) -> DriftReport:
        """The figures of all rows so far; there must be one."""
        return DriftReport(
            rows=self._rows,
            positions=self._positions,
            kl_mean=self._kl / self._positions,
            kl_max=self._kl_max,
            logprob_mean=self._difference / max(self._values, 1),
            logprob_max=self._difference_max,
            logprob_max_beyond_rounding=self._beyond_max,
            top1_agreement=self._top1 / self._positions,
            ids_differing_mean=self._ids / self._positions,
            ids_differing_max=self._ids_max,
            worst_sample=self._worst[0],
            worst_position=self._worst[1],
            teachers_differ_in=teachers_differ_in,
        )


def cache_drift(
    a: Path | str | Cache, b: Path | str | Cache, rows: int | None = None, *, show_progress: bool = False
) -> DriftReport:
    """Compares rows that both caches have, spread evenly over them. Every row is proven to be of the same tokens.

    Args:
        rows: how many; None for all.

    Raises:
        CacheError: no cache, no common rows, damage, or caches of other tokens, another vocabulary, tokenizer or
            temperature.
        ValueError: ``rows`` below 1.
    """
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows}")
    caches = [open_cache(path) for path in (a, b)]
    _check_comparable(*caches)
    manifest_a, manifest_b = (cache.manifest for cache in caches)
    samples = np.flatnonzero(np.logical_and(*_committed(caches)))
    if not len(samples):
        raise CacheError(f"{caches[0].location} and {caches[1].location} have no captured row in common")
    if rows is not None and rows < len(samples):
        samples = samples[np.linspace(0, len(samples) - 1, rows).astype("i8")]
    readers = [CacheReader(cache) for cache in caches]
    sums = DriftSums()
    with progress("drift", len(samples), unit="rows", enabled=show_progress) as advance:
        for sample in samples.tolist():
            ours = readers[0].read(sample)
            theirs = readers[1].read(sample, ours.hash, expected_tokens=ours.tokens)
            sums.add(sample, row_drift(ours, theirs, manifest_a.value_dtype, manifest_b.value_dtype))
            advance(1)
    return sums.report(teachers_difference(manifest_a.teacher, manifest_b.teacher))


def teachers_difference(a: Any, b: Any) -> str | None:
    """The first field in which two teachers' identities differ, in words; None where they are the same.

    Fields that both have go first: each engine may have some of its own, which say less.
    """
    shared = [key for key in a if key in b]
    found = first_differing_field({key: a[key] for key in shared}, {key: b[key] for key in shared})
    found = found or first_differing_field(dict(a), dict(b))
    return None if found is None else f"{found[0]}: {found[1]!r}, {found[2]!r}"


def _committed(caches: list[Cache]) -> list[NDArray[np.bool_]]:
    """For each cache which samples it has, as far as both count."""
    both = min(cache.manifest.rows for cache in caches)
    found = []
    for cache in caches:
        there = np.zeros(cache.manifest.rows, bool)
        for shard in committed_shards(cache):
            ids = cache.manifest.shard_samples(shard)
            there[ids.start : ids.stop] = True
        found.append(there[:both])
    return found


def _check_comparable(a: Cache, b: Cache) -> None:
    def said(name: str, value: Any, other: Any, why: str) -> CacheError:
        return CacheError(
            f"{a.location} and {b.location} cannot be compared: their {name} are {value} and {other}; {why}"
        )

    ours, theirs = a.manifest, b.manifest
    if ours.vocab_size != theirs.vocab_size:
        raise said("vocabularies", ours.vocab_size, theirs.vocab_size, "ids mean other tokens")
    if _tokenizer(ours) != _tokenizer(theirs):
        raise said("tokenizers", ours.tokenizer.get("name"), theirs.tokenizer.get("name"), "ids mean other tokens")
    if ours.temperatures[0] != theirs.temperatures[0]:
        raise said(
            "first temperatures",
            f"{ours.temperatures[0]:g}",
            f"{theirs.temperatures[0]:g}",
            "capture one of them again with the other's first of teacher.temperatures",
        )


def _tokenizer(manifest: CacheManifest) -> Any:
    return manifest.tokenizer.get("sha256")
