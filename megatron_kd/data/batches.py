"""Micro batches for training and evaluation. b rows, s positions, N = s·b tokens sequence first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.packing import labels_of
from megatron_kd.data.samples import SampleSet
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class Batch:
    """One micro batch of one data-parallel rank; the same on all its tensor-parallel ranks.

    Attributes:
        sample_ids: which rows.
        tokens: int64 [b, s].
        labels: int64 [N], the next token; −100 where the prediction does not train.
        token_weights: float32 [N], 1 where it trains, else 0.
        targets: of all N positions; None when the teacher runs beside the student.

    ``labels`` and ``token_weights`` stay on the CPU: from there masked rows can be left out without a device sync.
    """

    sample_ids: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    token_weights: Tensor
    targets: TopKTargets | None

    @property
    def num_tokens(self) -> int:
        """Unmasked tokens."""
        return int(torch.count_nonzero(self.token_weights))

    def to(self, device: torch.device) -> Batch:
        """The tokens and targets on the device."""
        targets = self.targets.to(device) if self.targets is not None else None
        return Batch(
            self.sample_ids, self.tokens.to(device, non_blocking=True), self.labels, self.token_weights, targets
        )


def make_batch(samples: SampleSet, sample_ids: Sequence[int], cached: CachedTargets | None) -> Batch:
    """Reads rows and, where there is a cache, their targets.

    Raises:
        DataError, CacheError: a row that does not exist, is damaged or belongs to other tokens.
    """
    rows = samples.rows(sample_ids)
    labels = np.stack(
        [labels_of(tokens, mask) for tokens, mask in zip(rows.tokens, rows.loss_mask, strict=True)], axis=1
    )
    return Batch(
        sample_ids=tuple(int(i) for i in sample_ids),
        tokens=torch.from_numpy(rows.tokens.astype(np.int64)),
        labels=torch.from_numpy(labels.reshape(-1).astype(np.int64)),
        token_weights=torch.from_numpy(rows.loss_mask.T.reshape(-1).astype(np.float32)),
        targets=cached.targets(sample_ids) if cached is not None else None,
    )
