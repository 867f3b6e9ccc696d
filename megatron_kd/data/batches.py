"""Micro batches for training and evaluation. b rows, s positions of this rank, N = s·b tokens sequence first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.data.documents import document_numbers
from megatron_kd.data.packing import labels_of
from megatron_kd.data.samples import SampleSet
from megatron_kd.device import host_buffer
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class Batch:
    """One micro batch of one data-parallel rank; the same on all its tensor-parallel ranks.

    Attributes:
        sample_ids: which rows.
        tokens: int64 [b, s].
        labels: int64 [N], the next token, of the next chunk where it lies there; −100 where the prediction does not
            train.
        token_weights: float32 [N], 1 where it trains, else 0.
        targets: of all N positions; None when the teacher runs beside the student.
        context: which positions of the rows these are.
        documents: int32 [b, whole rows], the document of each position; None where a token sees all before it.
        yardstick: targets of all N positions that evaluation measures a second divergence by; None in training.

    ``to`` leaves ``labels`` and ``token_weights`` on the CPU: from there masked rows can be left out without a device
    sync. The loss copies them to the device itself, so they lie in ``host_buffer`` memory like the rest.
    """

    sample_ids: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    token_weights: Tensor
    targets: TopKTargets | None
    context: ContextSlice = WHOLE
    documents: Tensor | None = None
    yardstick: TopKTargets | None = None

    @property
    def num_tokens(self) -> int:
        """Unmasked tokens."""
        return int(torch.count_nonzero(self.token_weights))

    @property
    def positions(self) -> Tensor:
        """int64 [b, s], the place of each token in its row or document, on the device of the tokens."""
        return self.context.places(self.tokens, self.documents)

    def to(self, device: torch.device) -> Batch:
        """The tokens, documents and targets on the device."""
        targets = self.targets.to(device) if self.targets is not None else None
        yardstick = self.yardstick.to(device) if self.yardstick is not None else None
        documents = self.documents.to(device, non_blocking=True) if self.documents is not None else None
        tokens = self.tokens.to(device, non_blocking=True)
        return replace(self, tokens=tokens, targets=targets, documents=documents, yardstick=yardstick)


def make_batch(
    samples: SampleSet, sample_ids: Sequence[int], cached: CachedTargets | None, context: ContextSlice = WHOLE
) -> Batch:
    """Reads rows and, where there is a cache, their targets.

    Args:
        context: the positions wanted of each row; no target of others is decoded.

    Raises:
        DataError, CacheError: a row that does not exist, is damaged or belongs to other tokens.
        ConfigError: rows that do not divide into the chunks of ``context``.
    """
    ids = tuple(int(i) for i in sample_ids)
    b, s = len(ids), context.length(samples.seq_length)
    tokens, labels = host_buffer((b, s), torch.int64), host_buffer((s, b), torch.int64)
    weights = host_buffer((s, b), torch.float32)
    for j, sample in enumerate(ids):
        row, mask = samples.tokens(sample), samples.loss_mask(sample)
        row_labels = labels_of(row, mask)
        at = 0
        for run in context.ranges(samples.seq_length):
            part, into = slice(run.start, run.stop), slice(at, at + len(run))
            tokens.numpy()[j, into] = row[part]
            labels.numpy()[into, j] = row_labels[part]
            weights.numpy()[into, j] = mask[part]
            at += len(run)
    documents = None
    if samples.within_documents:
        documents = host_buffer((b, samples.seq_length), torch.int32)
        documents.numpy()[:] = document_numbers([samples.document_offsets(i) for i in ids], samples.seq_length)
    return Batch(
        sample_ids=ids,
        tokens=tokens,
        labels=labels.view(-1),
        token_weights=weights.view(-1),
        targets=cached.targets(ids, context) if cached is not None else None,
        context=context,
        documents=documents,
    )
