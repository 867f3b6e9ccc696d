"""The tars that Megatron-LM writes for offline distillation, in both layouts.

First layout: ``cp{C}_dp{D}__{I}.tar``, I the last iteration inside, members ``{iteration}.pt.zst`` with a list of
micro batches [S/cp, M, K']; context-parallel parts are chunks C and 2·cp − 1 − C of 2·cp; micro batch m of
data-parallel rank d is block m·DP + d of its iteration. Second layout: ``dp{D}__{start}-{end}.tar``, the numbers being
samples, with ``{start}-{end}.pt.zst``: one array [S, N, K] of whole sequences for each rank; its row r is sample
((r // M)·DP + d)·M + r % M of the span. No row carries its tokens.

Legend: S positions, M rows of a micro batch, K' slots, DP and cp the sizes at writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.importers.megatron_index import (
    MAX_VOCAB_SIZE,
    VALUE_DTYPES,
    TarFolder,
    and_more,
    read_folder,
    span_words,
)
from megatron_kd.cache.importers.megatron_rows import first_layout_rows, largest_part, second_layout_rows
from megatron_kd.cache.importers.source import Samples, SourceRow
from megatron_kd.errors import CacheError


class MegatronTars:
    """A folder of tars of one run, as a ``Source``. Rows are found by their place in the order of the run."""

    engine = "megatron-lm"
    lossy = False
    proven = False

    def __init__(self, folder: Path | str, samples: Samples, *, vocab_size: int, first_iteration: int = 0) -> None:
        """Reads the directory of every tar and the metadata. The first layout's first iteration is decoded: only
        it tells the batch size.

        Args:
            first_iteration: of the first layout: the number of the iteration that saw sample 0.

        Raises:
            CacheError: no or mixed or foreign tars, missing parts (the first five named), other settings than these
                samples have, or a vocabulary that 17-bit ids cannot hold.
        """
        path = Path(folder)
        if vocab_size > MAX_VOCAB_SIZE:
            raise CacheError(
                f"{path} cannot hold targets over a vocabulary of {vocab_size}: its ids have 17 bits and end at "
                f"{MAX_VOCAB_SIZE}, larger ones were cut when they were written. Capture the targets instead"
            )
        self._folder = read_folder(path)
        self._seq_length = samples.seq_length
        _check_length(self._folder, samples)
        saver = self._folder.saver
        self._k, self._micro_batch = int(saver["k"]), int(saver.get("mbs_save", 1))
        self.top_k = min(self._k, vocab_size)
        self.value_dtype = VALUE_DTYPES[saver["save_dtype"]]
        self.identity: Mapping[str, Any] = {
            "layout": self._folder.layout,
            "hash": self._folder.meta.get("hash"),
            "identifiers": self._folder.meta.get("identifiers"),
            "saver": saver,
            "inventory": self._folder.digest,
        }
        self._spans = list(self._folder.parts)
        self._loaded: tuple[int, np.ndarray, np.ndarray] | None = None
        self._rows_per_span = 0
        if self._folder.layout == 1:
            _check_iterations(self._folder, first_iteration)
            # All but the last iteration hold samples only, which bounds the batch before it is known.
            self._most_rows = -(-2 * len(samples) // max(len(self._spans) - 1, 1))
            self._rows_per_span = len(self._span(0)[0])
        else:
            if first_iteration:
                raise CacheError(f"{path} names its files by samples, not by iterations: leave out --first-iteration")
            self._rows_per_span = _check_spans(self._folder)
            self._most_rows = -(-self._rows_per_span // self._folder.data_parallel)
        have = len(self._spans) * self._rows_per_span
        self.surplus_rows = have - len(samples)
        _check_count(self._folder, have, samples, self._rows_per_span)

    def read(self, sample: int) -> SourceRow:
        """See ``Source``. A span is decoded when its first row is asked for, and kept until another one is."""
        number, row = divmod(sample, self._rows_per_span)
        ids, logprobs = self._span(number)
        return SourceRow(f"{self._name(number)}, row {row}", ids[row], logprobs[row])

    def _span(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 and logprobs [rows, S, K'] of one iteration or span, in the order of the samples."""
        if self._loaded is not None and self._loaded[0] == number:
            return self._loaded[1], self._loaded[2]
        self._loaded = None  # one span in memory at a time
        folder = self._folder
        parts = folder.parts[self._spans[number]]
        limit = largest_part(self._most_rows, self._seq_length // folder.context_parallel, self._k)
        if folder.layout == 1:
            ids, logprobs = first_layout_rows(
                parts, folder.context_parallel, folder.data_parallel, self._seq_length, self._k, limit
            )
        else:
            ids, logprobs = second_layout_rows(
                parts, folder.data_parallel, self._micro_batch, self._seq_length, self._k, limit
            )
        if self._rows_per_span and len(ids) != self._rows_per_span:
            raise CacheError(
                f"{self._name(number)} and its other ranks hold {len(ids)} rows instead of {self._rows_per_span}: "
                "it is damaged, or the batch size changed during the run, which cannot be imported"
            )
        self._loaded = (number, ids, logprobs)
        return ids, logprobs

    def _name(self, number: int) -> str:
        _, member = min(self._folder.parts[self._spans[number]].items())
        return member.where


def _check_length(folder: TarFolder, samples: Samples) -> None:
    identifiers = folder.meta.get("identifiers")
    length = identifiers.get("sequence_length") if isinstance(identifiers, dict) else None
    if length is not None and length != samples.seq_length:
        raise CacheError(
            f"{folder.path} holds rows of {length} positions, {samples.path} of {samples.seq_length} tokens"
        )


def _check_iterations(folder: TarFolder, first: int) -> None:
    there = {span[0] for span in folder.parts}
    wanted = range(first, max(there) + 1)
    count = len(wanted) - sum(number in wanted for number in there)
    if count:
        missing = islice((number for number in wanted if number not in there), 5)
        raise CacheError(
            f"{folder.path} is incomplete: it lacks iterations {', '.join(map(str, missing))}{and_more(count)}. "
            "Rows behind a gap would move to other samples; say --first-iteration if the run began later"
        )
    if min(there) < first:
        raise CacheError(f"{folder.path} holds iteration {min(there)}, before --first-iteration {first}")


def _check_spans(folder: TarFolder) -> int:
    """The rows of every span of the second layout. Raises CacheError unless they tile the samples from 0."""
    gaps, end = [], 0
    for start, stop in folder.parts:
        if start < end:
            raise CacheError(f"{folder.path}: samples {start} to {min(end, stop) - 1} are in two spans; remove one")
        if start > end:
            gaps.append((end, start))
        end = stop
    if gaps:
        words = ", ".join(span_words(gap, 2).removeprefix("samples ") for gap in gaps[:5])
        raise CacheError(f"{folder.path} is incomplete: it lacks samples {words}{and_more(len(gaps))}")
    sizes = sorted({stop - start for start, stop in folder.parts})
    if len(sizes) > 1:
        raise CacheError(
            f"{folder.path} has spans of {sizes[0]} and of {sizes[-1]} samples: a batch size that changes during the "
            "run cannot be imported"
        )
    return sizes[0]


def _check_count(folder: TarFolder, have: int, samples: Samples, batch: int) -> None:
    need = len(samples)
    if have < need:
        raise CacheError(
            f"{folder.path} is incomplete: it holds {have} rows, {samples.path} {need} samples; "
            f"samples {have} to {need - 1} are missing"
        )
    if have - need >= batch:
        raise CacheError(
            f"{folder.path} holds {have} rows, {samples.path} only {need} samples: more than a last batch is left "
            "over, so these are not the samples that were scored"
        )
