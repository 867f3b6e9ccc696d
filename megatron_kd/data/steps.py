"""The rows of each training step, read ahead by one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_kd.data.batches import Batch, make_batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.data.prefetch import Prefetcher
from megatron_kd.data.sampler import SampleOrder
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import DataError


def train_rows(samples: SampleSet, train_tokens: int | None) -> range:
    """The sample ids that a run trains on: the training split, or as many of its first rows as ``train_tokens`` make.

    Raises:
        DataError: the split has fewer.
    """
    ids = samples.split("train")
    if train_tokens is None:
        return ids
    wanted = train_tokens // samples.seq_length
    if wanted > len(ids):
        raise DataError(
            f"data.train_tokens {train_tokens} is {wanted} rows of {samples.seq_length} tokens, {samples.path} has "
            f"{len(ids)} to train on: lower data.train_tokens to {len(ids) * samples.seq_length}, or prepare more rows "
            "into another data.samples"
        )
    return ids[:wanted]


@dataclass(frozen=True)
class StepReader:
    """Reads this rank's micro batches of a step; touches no process group, so that threads may call it.

    Ranks of one data-parallel rank (tensor-parallel ones) get equal batches, those of a context-parallel group the
    positions of their ``context``.
    """

    samples: SampleSet
    cached: CachedTargets | None
    order: SampleOrder
    dp_rank: int
    dp_size: int
    micro_batch_size: int
    context: ContextSlice = WHOLE

    def __call__(self, step: int) -> list[Batch]:
        """The micro batches of the step-th iteration counted from 0, read now."""
        return [self._read(ids) for ids in self._ids(step)]

    @contextmanager
    def ahead(self, start: int, stop: int, *, prefetch_batches: int, num_workers: int) -> Iterator[StepsAhead]:
        """The steps from ``start`` to ``stop``, read in ``num_workers`` threads while the block is entered.

        The unit of reading is the micro batch; of those, ``prefetch_batches`` steps' worth are held ready, and at
        least one for each thread.
        """
        portions = len(self._ids(start))
        depth = max(prefetch_batches * portions, num_workers)
        keys = (ids for step in range(start, stop) for ids in self._ids(step))
        with Prefetcher(keys, self._read, depth, num_workers) as batches:
            yield StepsAhead(batches, portions)

    def _ids(self, step: int) -> list[list[int]]:
        consumed = step * self.order.global_batch_size
        return [ids.tolist() for ids in self.order.ids_for(consumed, self.dp_rank, self.dp_size, self.micro_batch_size)]

    def _read(self, ids: list[int]) -> Batch:
        return make_batch(self.samples, ids, self.cached, self.context)


class StepsAhead:
    """Micro batches that are being read ahead, handed out step by step.

    Attributes:
        waited_s: how long the last step had to wait for its micro batches.
    """

    def __init__(self, batches: Prefetcher[list[int], Batch], portions: int) -> None:
        """``portions``: micro batches of a step."""
        self.waited_s = 0.0
        self._batches, self._portions = batches, portions

    def __next__(self) -> list[Batch]:
        """The next step, all of it: an error of any of its rows is raised before the step can begin."""
        before = self._batches.waited_s
        try:
            return [next(self._batches) for _ in range(self._portions)]
        finally:
            self.waited_s = self._batches.waited_s - before

    def __iter__(self) -> StepsAhead:
        return self
