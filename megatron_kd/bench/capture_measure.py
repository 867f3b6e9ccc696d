"""The parts of a capture and of the bare forward pass, timed round by round on the same rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_kd.bench.capture_bare import BareForward
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.data.samples import RowBatch, SampleSet
from megatron_kd.device import current_device, is_cuda, lost_ranks_reported, synchronize
from megatron_kd.errors import CacheError
from megatron_kd.progress import Advance
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.score import rows_of


@dataclass(frozen=True)
class Round:
    """Seconds a token of each part in one round.

    Attributes:
        forward: tokens to the last hidden states.
        head: their logits, which nothing looks at.
        top_k: all the engine does for the targets, forward pass included.
        rows: targets to rows of a cache in host memory.
        write: the rows to a committed shard.
    """

    forward: float
    head: float
    top_k: float
    rows: float
    write: float

    @property
    def bare(self) -> float:
        """The bare forward pass."""
        return self.forward + self.head

    @property
    def scoring(self) -> float:
        """What the thread does that drives the teacher."""
        return self.top_k + self.rows

    @property
    def capture(self) -> float:
        """All a capture does for a token."""
        return self.scoring + self.write

    @property
    def overhead(self) -> float:
        """What a capture costs beyond the bare forward pass, as a share of that."""
        return self.capture / self.bare - 1


PARTS = tuple(field.name for field in fields(Round))


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        cache: with a shard for each round and one more; None on ranks that do not write.
        dtype: of the rows' log-probabilities, float16 or float32.
    """

    teacher: TeacherEngine
    bare: BareForward
    samples: SampleSet
    cache: Cache | None
    dtype: type[np.floating[Any]]


def clock_name() -> str:
    """What the seconds are: ``process_cpu`` (all threads of the process), on a GPU ``wall``."""
    return "wall" if is_cuda() else "process_cpu"


def measure_rounds(subject: Subject, batches: Sequence[Sequence[int]], advance: Advance) -> list[Round]:
    """One round for each micro batch, after one that warms up on the first. Collective over the tensor-parallel group.

    Within a round all parts take the same rows, one after the other, and what comes first alternates: load on the
    machine and caches favour neither side. Advances by one unit a round, the warm-up included.

    Args:
        batches: sample ids of each micro batch.

    Raises:
        CacheError: the disk refuses.
        RemoteRankError: another rank died.
    """
    rounds = []
    for index, ids in enumerate([batches[0], *batches]):
        with lost_ranks_reported():
            seen = _round(subject, index, ids)
        if index:
            rounds.append(seen)
        advance(1, f"overhead {statistics.median(r.overhead for r in rounds):.1%}" if rounds else "")
    return rounds


def _round(subject: Subject, index: int, ids: Sequence[int]) -> Round:
    batch = subject.samples.rows(ids)
    tokens = torch.from_numpy(batch.tokens).to(current_device(), torch.int64)
    if index % 2:
        forward, head = _bare(subject.bare, tokens)
        top_k, rows, made = _score(subject, ids, batch, tokens)
    else:
        top_k, rows, made = _score(subject, ids, batch, tokens)
        forward, head = _bare(subject.bare, tokens)
    write = _write(subject.cache, index, made)
    return Round(forward, head, top_k, rows, write)


def _bare(bare: BareForward, tokens: Tensor) -> tuple[float, float]:
    forward, (hidden, weight) = _timed(lambda: bare.hidden(tokens))

    def project() -> None:
        for _ in bare.logits(hidden, weight):
            pass

    head, _ = _timed(project)
    return forward / tokens.numel(), head / tokens.numel()


def _score(subject: Subject, ids: Sequence[int], batch: RowBatch, tokens: Tensor) -> tuple[float, float, list[Row]]:
    top_k, extracted = _timed(lambda: subject.teacher.top_k(tokens))
    assert extracted is not None, "a pipeline of several stages was refused"
    rows, made = _timed(lambda: rows_of(ids, batch, extracted, subject.dtype))
    return top_k / tokens.numel(), rows / tokens.numel(), made


def _write(cache: Cache | None, shard: int, made: Sequence[Row]) -> float:
    """Seconds a token of writing a shard filled with the rows, again and again under other numbers."""
    if cache is None:
        return 0.0
    samples = cache.manifest.shard_samples(shard)
    rows = [replace(row, sample_id=i) for i, row in zip(samples, islice(cycle(made), len(samples)), strict=True)]
    seconds, committed = _timed(lambda: write_shard(cache, shard, rows))
    if not committed:
        raise CacheError(f"{cache.location}: shard {shard} is there already, so that its writing was not measured")
    return seconds / sum(map(len, rows))


def _timed[T](run: Callable[[], T]) -> tuple[float, T]:
    clock = time.perf_counter if is_cuda() else time.process_time
    synchronize()
    started = clock()
    done = run()
    synchronize()
    return clock() - started, done


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians and ranges over the rounds.

    Returns:
        ``us_per_token`` of each part, of ``bare`` (forward + head) and of ``capture`` (top_k + rows + write), with
        ``us_per_token_spread`` (lowest, highest); ``bare_tokens_per_s`` and ``capture_tokens_per_s``; ``overhead`` =
        capture / bare − 1 and ``overhead_without_write``, medians of the ratios within each round, and
        ``overhead_spread``; ``writer_share`` of a capture.
    """
    series = dict(zip(PARTS, map(list, zip(*map(astuple, rounds), strict=True)), strict=True))
    series |= {"bare": [r.bare for r in rounds], "capture": [r.capture for r in rounds]}
    medians = {name: 1e6 * statistics.median(values) for name, values in series.items()}
    overheads = [r.overhead for r in rounds]
    return {
        "us_per_token": medians,
        "us_per_token_spread": {name: [1e6 * min(values), 1e6 * max(values)] for name, values in series.items()},
        "bare_tokens_per_s": 1e6 / medians["bare"],
        "capture_tokens_per_s": 1e6 / medians["capture"],
        "overhead": statistics.median(overheads),
        "overhead_spread": [min(overheads), max(overheads)],
        "overhead_without_write": statistics.median(r.scoring / r.bare - 1 for r in rounds),
        "writer_share": statistics.median(r.write / r.capture for r in rounds),
    }
