"""The held-out rows as micro batches: of one shape, and as many on every data-parallel rank.

Stages of a pipeline hand each other tensors of one shape, and ranks that share experts must all take part in every
forward pass. So the last portions are filled up with rows that count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_kd.data.batches import Batch, make_batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.data.samples import SampleSet


@dataclass(frozen=True)
class HeldoutRows:
    """What one data-parallel rank evaluates. Touches no process group, so that threads may read.

    Attributes:
        ids: all rows of the split; at least one.
        cached: None where nobody looks at targets.
        context: the positions of each row that this rank works on.
        yardstick: targets that a second divergence is measured by; None where there is none to measure.
    """

    samples: SampleSet
    cached: CachedTargets | None
    ids: Sequence[int]
    micro_batch_size: int
    context: ContextSlice = WHOLE
    yardstick: CachedTargets | None = None

    def portions(self, dp_rank: int, dp_size: int) -> list[list[int]]:
        """This rank's portions of at most ``micro_batch_size`` rows, as many on every rank: the last may be empty."""
        size = self.micro_batch_size
        every = [list(self.ids[i : i + size]) for i in range(0, len(self.ids), size)]
        every += [[]] * (-len(every) % dp_size)
        return every[dp_rank::dp_size]

    def read(self, portion: Sequence[int]) -> Batch:
        """A micro batch of ``micro_batch_size`` rows that holds those of a portion, all others masked.

        Raises:
            DataError, CacheError: as ``make_batch``.
        """
        # Repeated is a row of this portion: one that another rank reads is that rank's to complain about.
        filler = portion[-1] if portion else self.ids[0]
        size = self.micro_batch_size
        ids = [*portion, *[filler] * (size - len(portion))]
        batch = make_batch(self.samples, ids, self.cached, self.context)
        if self.yardstick is not None:
            batch = replace(batch, yardstick=self.yardstick.targets(ids, self.context))
        # Sequence first: the rows of the batch are columns here.
        batch.labels.view(-1, size)[:, len(portion) :] = -100
        batch.token_weights.view(-1, size)[:, len(portion) :] = 0.0
        return batch
