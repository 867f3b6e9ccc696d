"""The cache as training sees it: checked against the run before the first step, then targets by sample id.

b rows, s positions of this rank, K tokens kept by the recipe (at most as many as the cache holds), N = s·b sequence
first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_kd.cache.mass import at_temperature
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import how_to_mend, open_cache
from megatron_kd.cache.verify import verify
from megatron_kd.config import ModelConfig
from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.data.row_join import first_foreign, rows_by_hash, rows_by_hash_together
from megatron_kd.data.samples import SampleSet
from megatron_kd.device import host_buffer
from megatron_kd.errors import CacheError, ForeignRowError, StoreUnreachableError
from megatron_kd.targets import TopKTargets

logger = logging.getLogger(__name__)


class CachedTargets:
    """Targets of a set of samples at one temperature, from a cache that was shown to belong to them."""

    def __init__(
        self,
        path: str | Path,
        samples: SampleSet,
        *,
        teacher: ModelConfig,
        top_k: int,
        temperature: float,
        student_vocab_size: int | None = None,
        weights_sha256: str | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Opens the cache and compares it with the run; reads no targets.

        A cache of these very samples has their rows at the same places. In another one (of more samples, in another
        order, with other loss masks) each sample's row is looked up by its hash, for which all samples are read once.

        Args:
            student_vocab_size: ids from this on are folded into the tail; None: no target may have any.
            weights_sha256: of the teacher's weights, where they are at hand; those of the cache must be the same.
            share: (i, n): look at the files of every n-th shard from the i-th on, where n ranks open one cache; each
                shard has some twenty files, and a file system for all would be asked for all of them by each rank.
                Where rows have to be looked up, ``joined`` is then False until all ranks called ``join``.

        Raises:
            CacheError: no cache, missing rows, samples without a row, another tokenizer, a larger vocabulary, another
                teacher, fewer kept tokens or other temperatures. The message says which and what to do.
        """
        cache = open_cache(path)
        self._cache = cache
        self._reader = CacheReader(cache)
        self._samples = samples
        self.top_k = top_k
        self.temperature = temperature
        manifest = cache.manifest
        folds = student_vocab_size is not None and student_vocab_size < manifest.vocab_size
        self._fold_from = student_vocab_size if folds else None
        self._check_tokenizer()
        if manifest.vocab_size > teacher.vocab_size:
            raise CacheError(
                f"{path} holds ids of a vocabulary of {manifest.vocab_size}, teacher.model {teacher.name!r} has "
                f"{teacher.vocab_size}: correct teacher.model or teacher.cache"
            )
        if top_k > manifest.top_k:
            raise CacheError(
                f"{path} keeps {manifest.top_k} tokens a position, teacher.top_k asks for {top_k}: "
                "lower teacher.top_k or capture again"
            )
        if temperature not in manifest.temperatures:
            raise CacheError(
                f"{path} was captured at the temperatures {list(manifest.temperatures)}, loss.temperature is "
                f"{temperature}: choose one of them or capture again with it in teacher.temperatures"
            )
        _check_teacher(path, manifest.teacher, teacher, weights_sha256)
        self._reader.require_complete()
        self._check_files(range(share[0], manifest.shards, share[1]))
        self._rows: NDArray[np.int64] | None = None
        self._hashes_compared = False
        if manifest.corpus.get("content") == samples.manifest["content"]:
            self._rows = np.arange(len(samples))
        elif share[1] == 1:
            self._take_joined(rows_by_hash(cache, samples))

    def as_captured(self) -> CachedTargets | None:
        """The same rows with all tokens the cache keeps, at temperature 1: one measure for all runs on the cache.

        None where the cache was not captured at temperature 1. Call it after ``join``.
        """
        manifest = self._cache.manifest
        if 1.0 not in manifest.temperatures:
            return None
        other = copy(self)
        other.top_k, other.temperature = manifest.top_k, 1.0
        return other

    @property
    def joined(self) -> bool:
        """Whether it is known which row of the cache is whose; nothing can be read before."""
        return self._rows is not None

    def join(self, what: str) -> None:
        """Looks up the row of each sample by its hash, each rank a share of them. Collective over all ranks.

        Args:
            what: is being done, for the message of the ranks that have no failure of their own.

        Raises:
            CacheError: samples without a row, on one rank.
            RemoteRankError: on the others.
        """
        self._take_joined(rows_by_hash_together(what, self._cache, self._samples))

    def _take_joined(self, rows: NDArray[np.int64]) -> None:
        self._rows, self._hashes_compared = rows, True
        samples = self._samples
        logger.info(
            "%s was made from other samples; the %d rows of %s are in it",
            self._cache.location,
            len(samples),
            samples.path,
        )

    def _known_rows(self) -> NDArray[np.int64]:
        assert self._rows is not None, "opened with a share, and join was not called"
        return self._rows

    def _check_files(self, shards: Sequence[int]) -> None:
        # Names and sizes only, which takes no reading: a truncated file must not end a run after days.
        path = self._cache.location
        report = verify(self._cache, "inventory", shards=shards)
        damaged = report.problems
        if report.unreadable_shards:
            raise StoreUnreachableError(f"{path} cannot be used: {damaged[0]}{_more(damaged)}")
        if damaged:
            raise CacheError(f"{path} is damaged: {damaged[0]}{_more(damaged)}; {how_to_mend(self._cache)}")

    def _check_tokenizer(self) -> None:
        ours, theirs = self._samples.tokenizer_identity, self._cache.manifest.tokenizer
        if ours.get("sha256") != theirs.get("sha256"):
            raise CacheError(
                f"{self._cache.location} was captured with another tokenizer ({theirs.get('name')}, "
                f"{theirs.get('vocab_size')} tokens) than the samples {self._samples.path} ({ours.get('name')}, "
                f"{ours.get('vocab_size')} tokens): capture these samples into another teacher.cache"
            )

    def check_rows(self, sample_ids: Sequence[int]) -> None:
        """Compares the hashes of some samples, as they are on disk now, with those the cache's records list.

        Reads the tokens of the samples and no targets; many ranks may share the work. Where rows were just found by
        these hashes there is nothing left to compare.

        Raises:
            CacheError: the first sample that is not the one its row was captured from, with the differing position.
        """
        if self._hashes_compared:
            return
        sample = first_foreign(self._cache, self._samples, self._known_rows(), sample_ids)
        if sample is not None:
            # Reading it says what is wrong; a row that cannot be read at all is refused as well.
            self._read(sample, range(1))
            raise CacheError(
                f"sample {sample} of {self._samples.path} is not what {self._cache.location} was made from"
            )

    def targets(self, sample_ids: Sequence[int], context: ContextSlice = WHOLE) -> TopKTargets:
        """The targets of some rows, sequence first: ids [s·b, K], in memory that ``host_buffer`` gives.

        Ids that the student does not have are folded into the tail.

        Every row's token hash is compared with the sample's. May be called from several threads.

        Args:
            context: the positions wanted of each row; only the chunks that hold them are read and decoded.

        Raises:
            CacheError: a damaged or foreign row, with its id and where it differs.
            ConfigError: rows that do not divide into the chunks of ``context``.
        """
        length = self._samples.seq_length
        s, b, k = context.length(length), len(sample_ids), self.top_k
        ids, logprobs = host_buffer((s, b, k), torch.int32), host_buffer((s, b, k), self._logprob_dtype)
        tails = host_buffer((s, b), torch.float32)
        into_ids, into_logprobs, into_tails = ids.numpy(), logprobs.numpy(), tails.numpy()
        for j, sample in enumerate(sample_ids):
            at = 0
            for run in context.ranges(length):
                row_ids, row_logprobs, row_tails = self._at_temperature(self._read(int(sample), run))
                into = slice(at, at + len(run))
                # The only copy on the way from what was decoded; a batch of several rows has to interleave them.
                into_ids[into, j], into_logprobs[into, j], into_tails[into, j] = row_ids, row_logprobs, row_tails
                at += len(run)
        targets = TopKTargets(ids.view(s * b, k), logprobs.view(s * b, k), tails.view(s * b), self.temperature)
        if self._fold_from is not None:
            targets.fold_beyond(self._fold_from)
        return targets

    def _read(self, sample: int, run: range) -> Row:
        row, expected = int(self._known_rows()[sample]), self._samples.row_hash(sample)
        try:
            return self._reader.read_slice(row, run.start, run.stop, expected)
        except CacheError as error:
            found = error if isinstance(error, StoreUnreachableError) else self._in_detail(row, run, sample) or error
            why = str(found)
            if row != sample:
                why = f"the targets of sample {sample} of {self._samples.path} cannot be read: {why}"
            # Neither a disk that refuses nor a row of another sample is mended by writing it again.
            if not isinstance(found, StoreUnreachableError | ForeignRowError):
                why += f"; {how_to_mend(self._cache)}"
            raise type(found)(why) from error

    def _in_detail(self, row: int, run: range, sample: int) -> CacheError | None:
        """Why a row was refused, once more: given the sample's tokens, the reader names the first that differs."""
        tokens = self._samples.tokens(sample)
        try:
            self._reader.read_slice(row, run.start, run.stop, self._samples.row_hash(sample), expected_tokens=tokens)
        except CacheError as error:
            return error
        return None

    @property
    def _logprob_dtype(self) -> torch.dtype:
        """As stored where nothing is computed from it: half the bytes to the device."""
        manifest = self._cache.manifest
        as_stored = manifest.value_dtype == "float16" and self.temperature == manifest.temperatures[0]
        return torch.float16 if as_stored else torch.float32

    def _at_temperature(self, row: Row) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        temperatures = self._cache.manifest.temperatures
        ids, logprobs, tail = row.ids, row.logprobs, row.tail_logmass
        if self.temperature != temperatures[0]:
            logprobs, tail = at_temperature(row, temperatures, self.temperature)
        if self.top_k < ids.shape[1]:
            tail = np.logaddexp(tail, _logsumexp(logprobs[:, self.top_k :].astype(np.float32)))
            ids, logprobs = ids[:, : self.top_k], logprobs[:, : self.top_k]
        return ids, logprobs, tail


def _more(problems: Sequence[str]) -> str:
    return f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""


def _logsumexp(values: NDArray[np.float32]) -> NDArray[np.float32]:
    most = values.max(axis=1, initial=-math.inf)
    finite = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(finite + np.log(np.exp(values - finite[:, None]).sum(axis=1)), np.float32)


def _check_teacher(path: str | Path, captured: Any, teacher: ModelConfig, weights_sha256: str | None) -> None:
    difference = teacher.first_difference(captured.get("architecture", {}))
    if difference is not None:
        field, theirs, ours = difference
        raise CacheError(
            f"{path} was captured from {captured.get('name')!r} with {field} {theirs}, teacher.model "
            f"{teacher.name!r} has {ours}: correct teacher.model or teacher.cache"
        )
    theirs = captured.get("weights_sha256")
    if weights_sha256 is not None and theirs is not None and theirs != weights_sha256:
        raise CacheError(
            f"{path} was captured from other weights ({theirs[:12]}…) than teacher.checkpoint holds "
            f"({weights_sha256[:12]}…): correct one of them, or capture into another teacher.cache"
        )
