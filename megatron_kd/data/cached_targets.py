"""The cache as training sees it: checked against the run before the first step, then targets by sample id.

b rows, s positions, K tokens kept by the recipe (at most as many as the cache holds), N = s·b sequence first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_kd.cache.mass import at_temperature
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.verify import verify
from megatron_kd.config import ModelConfig
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from megatron_kd.targets import TopKTargets

_REPAIR = (
    "`megatron-kd cache verify {0}` lists all damage; remove the damaged shards' records from {0}/commits and run "
    "`megatron-kd capture` again, it writes those shards anew"
)


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
        weights_sha256: str | None = None,
    ) -> None:
        """Opens the cache and compares it with the run; reads no row.

        Args:
            weights_sha256: of the teacher's weights, where they are at hand; those of the cache must be the same.

        Raises:
            CacheError: no cache, missing rows, or one of other samples, another tokenizer, another teacher, fewer
                kept tokens or other temperatures. The message says which and what to do.
        """
        self._path = path
        self._reader = CacheReader(path)
        self._samples = samples
        self.top_k = top_k
        self.temperature = temperature
        manifest = self._reader.manifest
        self._check_tokens(path)
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
        self._check_files(path)

    def _check_files(self, path: Path | str) -> None:
        # Names and sizes only, which takes no reading: a truncated file must not end a run after days.
        damaged = verify(path, "inventory").problems
        if damaged:
            raise CacheError(f"{path} is damaged: {damaged[0]}{_more(damaged)}; {_REPAIR.format(path)}")

    def _check_tokens(self, path: Path | str) -> None:
        manifest = self._reader.manifest
        ours, theirs = self._samples.tokenizer_identity, manifest.tokenizer
        if ours.get("sha256") != theirs.get("sha256"):
            raise CacheError(
                f"{path} was captured with another tokenizer ({theirs.get('name')}, {theirs.get('vocab_size')} tokens) "
                f"than the samples {self._samples.path} ({ours.get('name')}, {ours.get('vocab_size')} tokens): "
                "capture these samples into another teacher.cache"
            )
        if manifest.corpus.get("content") != self._samples.manifest["content"]:
            raise CacheError(
                f"{path} holds targets of other tokens than the samples {self._samples.path} "
                f"({manifest.rows} rows there, {len(self._samples)} here): capture these samples into another "
                "teacher.cache, or set data.samples to those it was made from"
            )

    def targets(self, sample_ids: Sequence[int]) -> TopKTargets:
        """The targets of some rows, sequence first: ids [s·b, K]. Every row's token hash is compared with the sample's.

        Raises:
            CacheError: a damaged or foreign row, with its id and where it differs.
        """
        try:
            rows = [
                self._reader.read(int(i), self._samples.row_hash(int(i)), expected_tokens=self._samples.tokens(int(i)))
                for i in sample_ids
            ]
        except CacheError as error:
            raise CacheError(f"{error}; {_REPAIR.format(self._path)}") from error
        parts = [self._at_temperature(row) for row in rows]
        ids, logprobs, tails = (np.stack([part[j] for part in parts], axis=1) for j in range(3))
        s, b, k = ids.shape
        return TopKTargets(
            torch.from_numpy(ids.reshape(s * b, k)),
            torch.from_numpy(logprobs.reshape(s * b, k)),
            torch.from_numpy(tails.reshape(s * b)),
            self.temperature,
        )

    def _at_temperature(self, row: Row) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        temperatures = self._reader.manifest.temperatures
        ids, logprobs, tail = row.ids, row.logprobs, row.tail_logmass  # as stored: half the bytes to the device
        if self.temperature != temperatures[0]:
            logprobs, tail = at_temperature(row, temperatures, self.temperature)
        if self.top_k < ids.shape[1]:
            tail = np.logaddexp(tail, _logsumexp(logprobs[:, self.top_k :].astype(np.float32)))
            ids, logprobs = ids[:, : self.top_k], logprobs[:, : self.top_k]
        return np.ascontiguousarray(ids), np.ascontiguousarray(logprobs), np.asarray(tail, np.float32)


def _more(problems: Sequence[str]) -> str:
    return f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""


def _logsumexp(values: NDArray[np.float32]) -> NDArray[np.float32]:
    most = values.max(axis=1, initial=-math.inf)
    finite = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(finite + np.log(np.exp(values - finite[:, None]).sum(axis=1)), np.float32)


def _check_teacher(path: Path | str, captured: Any, teacher: ModelConfig, weights_sha256: str | None) -> None:
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
