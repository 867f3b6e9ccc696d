"""The order in which training sees the samples: a pure function of the seed and the number of consumed samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_kd.errors import ConfigError


class SampleOrder:
    """An endless sequence of sample ids: epoch behind epoch, each a permutation of its own.

    The permutation is defined by integer arithmetic alone (a sort of SplitMix64 values), so the order is the same
    under every version of NumPy and resuming needs nothing but ``consumed_samples``. The last global batch of an
    epoch is filled from the next one.
    """

    def __init__(
        self,
        ids: int | range | Sequence[int] | NDArray[np.integer],
        *,
        seed: int,
        shuffle: bool,
        global_batch_size: int,
    ) -> None:
        """Takes the ids to train on (a number n means 0 … n−1). Raises ConfigError where nothing can be drawn."""
        self._ids = np.arange(ids) if isinstance(ids, int) else np.asarray(ids, dtype=np.int64)
        if not len(self._ids):
            raise ConfigError("there are no samples to train on: the train split is empty")
        if global_batch_size < 1:
            raise ConfigError(f"training.global_batch_size must be at least 1, not {global_batch_size}")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"the seed of the sample order must be from 0 to 2^64 − 1, not {seed}")
        self.seed, self.shuffle, self.global_batch_size = seed, shuffle, global_batch_size
        # Two epochs: a global batch may straddle them.
        self._epoch_ids = lru_cache(maxsize=2)(self._compute_epoch_ids)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._ids)

    def ids_at(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """The next ``count`` sample ids, int64 [count], after ``consumed_samples`` were drawn since the beginning."""
        if consumed_samples < 0 or count < 0:
            raise ValueError(f"negative position: consumed_samples {consumed_samples}, count {count}")
        parts = []
        while count:
            epoch, offset = divmod(consumed_samples, len(self._ids))
            part = self._epoch_ids(epoch)[offset : offset + count]
            parts.append(part)
            consumed_samples += len(part)
            count -= len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def ids_of_step(self, step: int) -> NDArray[np.int64]:
        """The global batch of the step-th iteration counted from 0: int64 [global_batch_size]."""
        return self.ids_at(step * self.global_batch_size, self.global_batch_size)

    def ids_for(
        self, consumed_samples: int, dp_rank: int, dp_size: int, micro_batch_size: int
    ) -> list[NDArray[np.int64]]:
        """One data-parallel rank's micro batches of the next global batch, each int64 [micro_batch_size].

        Micro batch m of rank d is block m·dp_size + d of the global batch, so the global batch is the same set for
        every layout. Raises ConfigError where the sizes do not divide.
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is outside 0 … {dp_size - 1}")
        if micro_batch_size < 1 or self.global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError(
                f"training.global_batch_size {self.global_batch_size} is not a multiple of training.micro_batch_size "
                f"{micro_batch_size} × data-parallel size {dp_size} = {micro_batch_size * dp_size}: change one of them"
            )
        blocks = self.ids_at(consumed_samples, self.global_batch_size).reshape(-1, dp_size, micro_batch_size)
        return list(blocks[:, dp_rank])

    def _compute_epoch_ids(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return self._ids
        # Chaining (and not adding) seed and epoch keeps epoch 1 of seed 0 apart from epoch 0 of seed 1.
        key = splitmix64(splitmix64(np.array([self.seed], np.uint64)) + np.uint64(epoch))
        values = splitmix64(np.arange(len(self._ids), dtype=np.uint64) ^ key)
        return self._ids[np.argsort(values, kind="stable")]


def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One SplitMix64 step of each value, uint64 arithmetic modulo 2^64 (Steele, Lea, Flood 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
