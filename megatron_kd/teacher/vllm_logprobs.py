"""From what vLLM answers to top-K targets: numbers only, nothing of vLLM is imported.

s positions of one row, M entries that vLLM gives for a position at most, K kept.

Entry n of vLLM's ``prompt_logprobs`` is about token n, that is the distribution *after* position n − 1; there is none
for token 0. The distribution after the last position is that of the one token it generates. Each entry has the K
likeliest tokens and the token that is there, first, whether or not it is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_kd.cache.mass import TAIL_FLOOR
from megatron_kd.errors import CheckpointError


@dataclass(frozen=True)
class RowTargets:
    """ids int32 [s, K] and log-probs float32 [s, K], descending, ties to the lower id; tail log-masses float32 [s]."""

    ids: np.ndarray
    logprobs: np.ndarray
    tail_logmass: np.ndarray


def row_targets(output: Any, length: int, top_k: int, vocab_size: int) -> RowTargets:
    """The targets of a row from vLLM's ``RequestOutput``.

    Of ids that come twice the larger value counts. The tail is by subtraction, log1p(−Σp) in float64 over the values
    as they are returned, at least log ``TAIL_FLOOR``; −inf where the whole vocabulary is kept.

    Raises:
        CheckpointError: positions or tokens are missing, an id is not of the vocabulary, a value is no log-probability.
    """
    prompt = output.prompt_logprobs
    generated = output.outputs[0].logprobs if output.outputs else None
    if prompt is None or len(prompt) != length or not generated:
        given = "none" if prompt is None else len(prompt)
        raise CheckpointError(
            f"vLLM scored {given} of {length} positions of a row, and {'one' if generated else 'none'} behind them: "
            "this version of it cannot be the teacher"
        )
    entries = [_Entries.of(prompt).part(1, length), _Entries.of(generated).part(0, 1)]
    width = max(top_k, *(part.width for part in entries))
    parts = [part.rectangle(width) for part in entries]
    ids, logprobs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ids, logprobs = _best(ids, logprobs, top_k)
    _check(ids, logprobs, vocab_size)
    mass = np.exp(logprobs).sum(axis=1)
    tail = np.log1p(-np.minimum(mass, 1 - TAIL_FLOOR)) if top_k < vocab_size else np.full(length, -np.inf)
    return RowTargets(ids.astype(np.int32), logprobs.astype(np.float32), tail.astype(np.float32))


@dataclass(frozen=True)
class _Entries:
    """Entries one after the other; those of position n are from ``starts[n]`` to ``ends[n]``."""

    starts: np.ndarray
    ends: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of(cls, container: Any) -> _Entries:
        """From a ``FlatLogprobs``, or from a list of {id: Logprob} with None for an empty position."""
        if hasattr(container, "start_indices"):
            starts, ends = np.array(container.start_indices, np.int64), np.array(container.end_indices, np.int64)
            return cls(starts, ends, np.array(container.token_ids, np.int64), np.array(container.logprobs, np.float64))
        positions = [position or {} for position in container]
        ends = np.cumsum([len(position) for position in positions], dtype=np.int64)
        ids = [token for position in positions for token in position]
        logprobs = [entry.logprob for position in positions for entry in position.values()]
        starts = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
        return cls(starts, ends, np.array(ids, np.int64), np.array(logprobs, np.float64))

    @property
    def width(self) -> int:
        return int((self.ends - self.starts).max(initial=0))

    def part(self, first: int, last: int) -> _Entries:
        return _Entries(self.starts[first:last], self.ends[first:last], self.ids, self.logprobs)

    def rectangle(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and log-probs [positions, width], −1 and −inf behind the last entry of a position."""
        places = self.starts[:, None] + np.arange(width)
        there = places < self.ends[:, None]
        ids = np.full(there.shape, -1, np.int64)
        logprobs = np.full(there.shape, -np.inf)
        ids[there] = self.ids[places[there]]
        logprobs[there] = self.logprobs[places[there]]
        return ids, logprobs


def _best(ids: np.ndarray, logprobs: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The K best different ids of each position, descending, ties to the lower id."""
    rows = np.arange(len(ids))[:, None]
    by_id = np.lexsort((-logprobs, ids), axis=1)
    ids, logprobs = ids[rows, by_id], logprobs[rows, by_id]
    again = np.zeros(ids.shape, bool)
    again[:, 1:] = ids[:, 1:] == ids[:, :-1]
    ids, logprobs = np.where(again, -1, ids), np.where(again, -np.inf, logprobs)
    # What is no number comes first, so that it is not cut off unseen; what is not there comes last.
    best = np.lexsort((ids, -np.where(np.isnan(logprobs), np.inf, logprobs), ids < 0), axis=1)[:, :top_k]
    return ids[rows, best], logprobs[rows, best]


def _check(ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
    few = (ids < 0).any(axis=1)
    if few.any():
        position = int(few.argmax())
        raise CheckpointError(
            f"vLLM gave {int((ids[position] >= 0).sum())} tokens after position {position}, teacher.top_k is "
            f"{ids.shape[1]}: this version of it cannot be the teacher"
        )
    if ids.max() >= vocab_size:
        raise CheckpointError(
            f"vLLM gave the token {ids.max()}, teacher.model.vocab_size is {vocab_size}: correct the recipe"
        )
    # Float32 sums round: a certain token may come out a little above 0.
    wrong = ~(np.isfinite(logprobs) & (logprobs < 1e-3))
    if wrong.any():
        position, slot = np.argwhere(wrong)[0]
        raise CheckpointError(
            f"vLLM gave the token {ids[position, slot]} after position {position} the log-probability "
            f"{logprobs[position, slot]}: the weights or their arithmetic overflow; try teacher.vllm.dtype bf16 or fp32"
        )
