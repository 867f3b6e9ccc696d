"""What the teacher proposes, counted on a few rows: it decides how small a cache becomes.

What a cache stores are candidates, not the tokens of the corpus. Ids numbered by how often they are candidates take
about 6 % less space than numbered by how often they are tokens; a thousand positions tell enough.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_kd.config import Recipe
from megatron_kd.data.samples import RowBatch, SampleSet
from megatron_kd.device import KeptFaults, sum_over_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.rows import rows_at_once, rows_together
from megatron_kd.teacher.score import READING, SCORING, attempt_score
from megatron_kd.teacher.topk import ExtractedTopK

PROBE_POSITIONS = 4096
PROBE_SHARE = 64
"""At most one position in so many of the corpus is scored twice."""
PREFIX = 256
"""Positions of a row; many short prefixes tell more than few whole rows."""


def probe_plan(rows: int, seq_length: int, multiple: int = 1) -> tuple[list[int], int]:
    """Which samples are probed, spread evenly, and how many of their first positions.

    Args:
        rows: how many samples there are.
        multiple: of which the number of positions must be one, as ``seq_length`` is.
    """
    prefix = min(seq_length, PREFIX)
    prefix = max(multiple, prefix - prefix % multiple)
    positions = min(PROBE_POSITIONS, rows * seq_length // PROBE_SHARE)
    count = max(1, min(rows, positions // prefix))
    return [(2 * i + 1) * rows // (2 * count) for i in range(count)], prefix


def count_scored_ids(recipe: Recipe, samples: SampleSet, teacher: TeacherEngine, groups: ParallelGroups) -> np.ndarray:
    """The top-K ids of some positions as one array int64, each id as often as it occurs, ascending.

    Each data-parallel rank scores some of the rows. Collective over all ranks; all get the same.

    Raises:
        DataError: the samples cannot be read.
        RemoteRankError: another rank failed or died.
    """
    chosen, prefix = probe_plan(len(samples), samples.seq_length, groups.length_multiple)
    mine = chosen[groups.dp_rank :: groups.dp_size]
    vocab_size, step = recipe.teacher.model.vocab_size, rows_at_once(recipe, groups)
    counts = np.zeros(vocab_size, np.int64)
    most = rows_together(groups, len(chosen[:: groups.dp_size]))
    faults = KeptFaults(READING, SCORING)
    # A few thousand positions: all are read before any is scored, so that one exchange tells of a failure.
    begins = range(0, max(len(mine), most), step)
    batches = faults.attempt(
        READING, lambda: [_prefixes(samples, mine[begin : begin + step], prefix) for begin in begins]
    )
    faults.agree()
    for begin, batch in zip(begins, batches or (), strict=True):
        scored = attempt_score(faults, teacher, batch, groups, min(step, max(0, most - begin)))
        if scored is not None and groups.writes_output:
            found = faults.attempt(SCORING, _counts, scored, vocab_size)
            counts += 0 if found is None else found
    faults.agree()
    return np.repeat(np.arange(vocab_size), sum_over_ranks(counts.tolist()))


def _counts(scored: ExtractedTopK, vocab_size: int) -> NDArray[np.int64]:
    ids = scored.targets.ids.cpu().numpy()
    return np.bincount(ids[ids >= 0], minlength=vocab_size)


def _prefixes(samples: SampleSet, ids: list[int], length: int) -> RowBatch:
    """The first tokens of some samples: a causal model says the same of a prefix as of the whole row."""
    batch = samples.rows(ids)
    return replace(batch, tokens=batch.tokens[:, :length])
