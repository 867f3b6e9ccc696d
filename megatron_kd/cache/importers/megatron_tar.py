"""The tars that Megatron-LM writes for offline distillation, in both layouts.

First layout: ``cp{C}_dp{D}__{I}.tar``, I the last iteration inside, members ``{iteration}.pt.zst`` with a list of
micro batches [S/cp, M, K']; context-parallel parts are chunks C and 2·cp − 1 − C of 2·cp; micro batch m of
data-parallel rank d is block m·DP + d of its iteration. Second layout: ``dp{D}__{start}-{end}.tar``, the numbers being
samples, with ``{start}-{end}.pt.zst``: one array [S, N, K] of whole sequences for each rank; its row r is sample
((r // M)·DP + d)·M + r % M of the span. No row carries its tokens.

Legend: S positions, M rows of a micro batch, K' slots, DP and cp the sizes at writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache.importers.megatron_rows import first_layout_rows, second_layout_rows
from megatron_kd.cache.importers.payload import Member, members
from megatron_kd.cache.importers.source import Samples, SourceRow
from megatron_kd.errors import CacheError

MAX_VOCAB_SIZE = 2**17
_FIRST = re.compile(r"cp(\d{1,6})_dp(\d{1,6})__(\d{1,18})\.tar", re.ASCII)
_SECOND = re.compile(r"dp(\d{1,6})__(\d{1,18})-(\d{1,18})\.tar", re.ASCII)
_ITERATION = re.compile(r"(\d{1,18})\.pt\.zst", re.ASCII)
_SPAN = re.compile(r"(\d{1,18})-(\d{1,18})\.pt\.zst", re.ASCII)
_META = "_meta.json"
_MAX_META_BYTES = 2**20
_VALUE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

_Rank = tuple[int, int]  # context-parallel, data-parallel
_Parts = dict[_Rank, Member]


@dataclass(frozen=True)
class _Tar:
    path: Path
    layout: int
    rank: _Rank


class MegatronTars:
    """A folder of tars of one run, as a ``Source``. Rows are found by their place in the order of the run."""

    engine = "megatron-lm"
    lossy = False
    proven = False

    def __init__(self, folder: Path | str, samples: Samples, *, vocab_size: int, first_iteration: int = 0) -> None:
        """Reads the directory of every tar and the metadata; decodes the first span.

        Args:
            first_iteration: of the first layout: the number of the iteration that saw sample 0.

        Raises:
            CacheError: no or mixed or foreign tars, missing parts (the first five named), other settings than these
                samples have, or a vocabulary that 17-bit ids cannot hold.
        """
        self._folder = Path(folder)
        if vocab_size > MAX_VOCAB_SIZE:
            raise CacheError(
                f"{self._folder} cannot hold targets over a vocabulary of {vocab_size}: its ids have 17 bits and "
                f"end at {MAX_VOCAB_SIZE}, larger ones were cut when they were written. Capture the targets instead"
            )
        self._seq_length = samples.seq_length
        tars = _tars(self._folder)
        self.layout = tars[0].layout
        self._ranks = _ranks(self._folder, tars)
        self._cp = max(c for c, _ in self._ranks) + 1
        self._dp = max(d for _, d in self._ranks) + 1
        meta, found, digest = _index(self._folder, tars)
        self._saver = _saver(self._folder, meta, samples, self.layout, self._dp)
        self.top_k = min(int(self._saver["k"]), vocab_size)
        self.value_dtype = _VALUE_DTYPES[self._saver["save_dtype"]]
        self.identity: Mapping[str, Any] = {
            "layout": self.layout,
            "hash": meta.get("hash"),
            "identifiers": meta.get("identifiers"),
            "saver": self._saver,
            "inventory": digest,
        }
        self._spans = sorted(found)
        self._found = found
        self._loaded: tuple[int, np.ndarray, np.ndarray] | None = None
        self._check_parts()
        if self.layout == 1:
            self._check_numbers(range(first_iteration, self._spans[-1][0] + 1))
        else:
            self._check_tiling()
        self._rows_per_span = self._span_size()
        have = len(self._spans) * self._rows_per_span
        self.surplus_rows = have - len(samples)
        self._check_count(have, len(samples), samples)

    def read(self, sample: int) -> SourceRow:
        """See ``Source``. A span is decoded when its first row is asked for, and kept until another one is."""
        number, row = divmod(sample, self._rows_per_span)
        ids, logprobs = self._span(number)
        return SourceRow(f"{self._name(number)}, row {row}", ids[row], logprobs[row])

    def _span(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 and logprobs [rows, S, K'] of one iteration or span, in the order of the samples."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None  # one span in memory at a time
            parts = self._found[self._spans[number]]
            if self.layout == 1:
                ids, logprobs = first_layout_rows(parts, self._cp, self._dp, self._seq_length, int(self._saver["k"]))
            else:
                ids, logprobs = second_layout_rows(
                    parts, self._dp, int(self._saver["mbs_save"]), self._seq_length, int(self._saver["k"])
                )
            self._loaded = (number, ids, logprobs)
            expected = self._rows_per_span if number else len(ids)
            if len(ids) != expected:
                raise CacheError(
                    f"{self._name(number)} holds {len(ids)} rows, the first one {expected}: a batch size that changes "
                    "during the run cannot be imported"
                )
        return self._loaded[1], self._loaded[2]

    def _name(self, number: int) -> str:
        (_, member) = min(self._found[self._spans[number]].items())
        return member.where

    def _span_size(self) -> int:
        rows = len(self._span(0)[0])
        if self.layout == 2:
            wrong = [span for span in self._spans if span[1] - span[0] != rows]
            if wrong:
                raise CacheError(
                    f"{self._folder}: span {wrong[0][0]}-{wrong[0][1]} does not hold {rows} rows, others do"
                )
        return rows

    def _check_parts(self) -> None:
        missing = [
            (self._label(span), rank) for span in self._spans for rank in self._ranks if rank not in self._found[span]
        ]
        if missing:
            words = ", ".join(f"{span} of {_rank_words(rank, self.layout)}" for span, rank in missing[:5])
            raise CacheError(f"{self._folder} is incomplete: it lacks {words}{_more(len(missing))}")

    def _label(self, span: tuple[int, int]) -> str:
        return f"iteration {span[0]}" if self.layout == 1 else f"samples {span[0]}-{span[1]}"

    def _check_numbers(self, wanted: range) -> None:
        there = {span[0] for span in self._spans}
        count = len(wanted) - sum(number in wanted for number in there)
        if count:
            first = islice((number for number in wanted if number not in there), 5)
            raise CacheError(
                f"{self._folder} is incomplete: it lacks iterations {', '.join(map(str, first))}{_more(count)}. "
                "Rows behind a gap would move to other samples; say --first-iteration if the run began later"
            )
        if self._spans[0][0] < wanted.start:
            raise CacheError(f"{self._folder} holds iteration {self._spans[0][0]}, before --first-iteration")

    def _check_tiling(self) -> None:
        gaps, end = [], 0
        for start, stop in self._spans:
            if start < end:
                raise CacheError(
                    f"{self._folder}: samples {start} to {min(end, stop) - 1} are in two spans; remove one"
                )
            if start > end:
                gaps.append((end, start))
            end = stop
        if gaps:
            words = ", ".join(f"{start}-{stop}" for start, stop in gaps[:5])
            raise CacheError(f"{self._folder} is incomplete: it lacks samples {words}{_more(len(gaps))}")

    def _check_count(self, have: int, need: int, samples: Samples) -> None:
        if have < need:
            raise CacheError(
                f"{self._folder} is incomplete: it holds {have} rows, {samples.path} {need} samples; "
                f"samples {have} to {need - 1} are missing"
            )
        if have - need >= self._rows_per_span:
            raise CacheError(
                f"{self._folder} holds {have} rows, {samples.path} only {need} samples: more than a last batch is left "
                "over, so these are not the samples that were scored"
            )


def _more(count: int) -> str:
    return f" and {count - 5} more" if count > 5 else ""


def _rank_words(rank: _Rank, layout: int) -> str:
    return f"cp{rank[0]}_dp{rank[1]}" if layout == 1 else f"dp{rank[1]}"


def _tars(folder: Path) -> list[_Tar]:
    """The tars of a folder, all of one layout, by rank and number."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".tar"))
    except OSError as error:
        raise CacheError(f"{folder} cannot be listed: {error.strerror}") from error
    tars: list[tuple[_Rank, int, _Tar]] = []
    for name in names:
        if first := _FIRST.fullmatch(name):
            rank, number, layout = (int(first[1]), int(first[2])), int(first[3]), 1
        elif second := _SECOND.fullmatch(name):
            rank, number, layout = (0, int(second[1])), int(second[2]), 2
        else:
            raise CacheError(
                f"{folder / name} has no name of a layout that can be read (cp0_dp0__99.tar or dp0__0-640.tar)"
            )
        tars.append((rank, number, _Tar(folder / name, layout, rank)))
    if not tars:
        raise CacheError(f"{folder} holds no tars of Megatron-LM's offline distillation")
    if len({tar.layout for *_, tar in tars}) > 1:
        raise CacheError(f"{folder} mixes two layouts of tars (cp0_dp0__99.tar and dp0__0-640.tar): keep one of them")
    return [tar for *_, tar in sorted(tars, key=lambda entry: entry[:2])]


def _ranks(folder: Path, tars: list[_Tar]) -> list[_Rank]:
    """All ranks of the run that wrote. Raises CacheError where one has no tar at all."""
    there = {tar.rank for tar in tars}
    cp, dp = (max(rank[i] for rank in there) + 1 for i in range(2))
    if cp * dp > len(there):
        missing = ((c, d) for c in range(cp) for d in range(dp) if (c, d) not in there)
        words = ", ".join(_rank_words(rank, tars[0].layout) for rank in islice(missing, 5))
        raise CacheError(f"{folder} is incomplete: it has no tars of {words}")
    return sorted(there)


def _index(folder: Path, tars: list[_Tar]) -> tuple[dict[str, Any], dict[tuple[int, int], _Parts], str]:
    """The metadata, which all tars share; the parts of every span; a digest of names and sizes."""
    meta: dict[str, Any] | None = None
    found: dict[tuple[int, int], _Parts] = {}
    state = xxhash.xxh3_128()
    for tar in tars:
        ours: dict[str, Any] | None = None
        for member in members(tar.path):
            if member.name == _META:
                ours = _read_meta(member)
                continue
            span = _span_of(member.name, tar.layout)
            if span is None:
                continue
            parts = found.setdefault(span, {})
            if tar.rank in parts:
                raise CacheError(f"{member.where} is there a second time, in {parts[tar.rank].tar.name}: remove one")
            parts[tar.rank] = member
            state.update(f"{tar.rank}/{member.name}/{member.size}\n".encode())
        if ours is None:
            raise CacheError(f"{tar.path} has no {_META}: nothing says what it was made from")
        if meta is not None and meta != ours:
            raise CacheError(f"{tar.path} is of another run than {tars[0].path.name}: their {_META} differ")
        meta = ours
    if not found or meta is None:
        raise CacheError(f"the tars of {folder} hold no rows")
    return meta, found, state.hexdigest()


def _span_of(name: str, layout: int) -> tuple[int, int] | None:
    if layout == 1:
        match = _ITERATION.fullmatch(name)
        return (int(match[1]), int(match[1]) + 1) if match else None
    match = _SPAN.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _read_meta(member: Member) -> dict[str, Any]:
    if member.size > _MAX_META_BYTES:
        raise CacheError(f"{member.where} has {member.size} bytes, far more than metadata needs")
    try:
        meta = json.loads(member.read())
    except ValueError as error:
        raise CacheError(f"{member.where} is not JSON: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("saver"), dict):
        raise CacheError(f"{member.where} does not say how it was saved (no saver)")
    return meta


def _saver(folder: Path, meta: dict[str, Any], samples: Samples, layout: int, dp: int) -> dict[str, Any]:
    """The settings at saving, checked against the samples and the tars."""
    saver = meta["saver"]
    if saver.get("save_dtype") not in _VALUE_DTYPES:
        raise CacheError(f"{folder}: save_dtype {saver.get('save_dtype')!r} must be one of {', '.join(_VALUE_DTYPES)}")
    for name in ("k",) if layout == 1 else ("k", "mbs_save", "dp_size_save"):
        if not isinstance(saver.get(name), int) or not 1 <= saver[name] <= MAX_VOCAB_SIZE:
            raise CacheError(f"{folder}: saver.{name} in {_META} is {saver.get(name)!r}, not a size")
    if layout == 2 and saver["dp_size_save"] != dp:
        raise CacheError(f"{folder} is incomplete: {dp} of {saver['dp_size_save']} data-parallel ranks have tars")
    identifiers = meta.get("identifiers")
    length = identifiers.get("sequence_length") if isinstance(identifiers, dict) else None
    if length is not None and length != samples.seq_length:
        raise CacheError(f"{folder} holds rows of {length} positions, {samples.path} of {samples.seq_length} tokens")
    return saver
