"""Samples scored by a teacher, as rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.row import Row
from megatron_kd.data.samples import RowBatch, SampleSet
from megatron_kd.device import KeptFaults, current_device, lost_ranks_reported
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.rows import joined, padded
from megatron_kd.teacher.topk import ExtractedTopK

READING, SCORING = "reading the samples", "scoring"
"""What ``KeptFaults`` of a capture are kept of."""


def score_rows(
    teacher: TeacherEngine,
    samples: SampleSet,
    ids: Sequence[int],
    dtype: type[np.floating[Any]],
    at_least: int = 0,
) -> list[Row]:
    """Some samples as rows of a cache. Collective over the ranks that ``TeacherEngine.top_k`` names.

    Args:
        dtype: of the log-probabilities, float16 or float32.
        at_least: rows to score where there are fewer ids, or none; see ``rows.rows_together``.

    Returns:
        One row an id; nothing on ranks that hold no answers (``ParallelGroups.writes_output``).

    Raises:
        DataError: the samples cannot be read.
        RemoteRankError: another rank died.
    """
    batch = samples.rows(ids)
    extracted = score(teacher, batch, at_least)
    return [] if extracted is None else rows_of(ids, batch, extracted, dtype)


def score(teacher: TeacherEngine, batch: RowBatch, at_least: int = 0) -> ExtractedTopK | None:
    """The teacher's answer [s·b] for rows [b, s] of samples, None on ranks without answers.

    Collective over the ranks that ``TeacherEngine.top_k`` names.

    Args:
        at_least: rows to score where there are fewer.

    Raises:
        ConfigError: memory ran out.
        RemoteRankError: another rank died.
    """
    rows, length = batch.tokens.shape
    tokens = padded(torch.from_numpy(batch.tokens), at_least)
    numbers, documents = batch.documents, None
    if numbers is not None:
        documents = padded(torch.from_numpy(numbers), at_least).to(current_device())
    try:
        with lost_ranks_reported():
            extracted = teacher.top_k(tokens.to(current_device(), torch.int64), documents)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"scoring {len(tokens)} rows of {length} tokens ran out of memory ({str(error).splitlines()[0]}): lower "
            "teacher.capture.micro_batch_size or loss.chunk_mib, or spread the teacher over more GPUs"
        ) from error
    return None if extracted is None else joined([extracted], length, rows)


def attempt_score(
    faults: KeptFaults, teacher: TeacherEngine, batch: RowBatch, groups: ParallelGroups, at_least: int = 0
) -> ExtractedTopK | None:
    """``score``, and None where it failed: the failure is kept until all ranks hear of it.

    Where ranks split the model, a failure is raised at once: peers that wait for this rank within the forward pass are
    told by its end alone.
    """
    if groups.tp_size * groups.pp_size * groups.cp_size * groups.ep_size > 1:
        return score(teacher, batch, at_least)
    return faults.attempt(SCORING, score, teacher, batch, at_least)


def rows_of(ids: Sequence[int], batch: RowBatch, extracted: ExtractedTopK, dtype: type[np.floating[Any]]) -> list[Row]:
    """What was scored, as rows of a cache.

    Args:
        ids: of the samples in ``batch``, which are b rows of s tokens.
        extracted: the teacher's answer, [s·b] sequence first.
        dtype: of the log-probabilities, float16 or float32.

    Raises:
        CheckpointError: the teacher's answer is NaN.
    """
    b, s = batch.tokens.shape
    k = extracted.targets.top_k
    token_ids = extracted.targets.ids.view(s, b, k).cpu().numpy()
    logprobs = extracted.targets.logprobs.view(s, b, k).cpu().numpy()
    tails = extracted.targets.tail_logmass.view(s, b).cpu().numpy()
    if np.isnan(tails).any():  # one logit that is NaN makes all of its position so
        position, row = (int(where[0]) for where in np.nonzero(np.isnan(tails)))
        raise CheckpointError(
            f"the teacher returned NaN for sample {ids[row]} at position {position}: its weights are damaged, or its "
            "numbers overflow in this precision"
        )
    extras = [[part.view(s, b).cpu().numpy() for part in pair] for pair in extracted.log_normalizers.values()]
    return [
        Row(
            sample_id=sample,
            tokens=batch.tokens[i],
            loss_mask=batch.loss_mask[i],
            document_offsets=batch.document_offsets[i],
            ids=np.ascontiguousarray(token_ids[:, i]),
            logprobs=np.minimum(logprobs[:, i], 0.0).astype(dtype),
            tail_logmass=np.minimum(tails[:, i], 0.0),
            log_normalizers=np.array([e[0][:, i] for e in extras], np.float32).reshape(len(extras), s),
            tail_logmass_extra=np.array([e[1][:, i] for e in extras], np.float32).reshape(len(extras), s),
            within_documents=batch.within_documents,
        )
        for i, sample in enumerate(ids)
    ]


def row_dtype(value_dtype: str) -> type[np.floating[Any]]:
    """The numpy type of a row's log-probabilities that are stored as ``value_dtype``; the writer rounds to bfloat16."""
    return np.float16 if value_dtype == "float16" else np.float32
