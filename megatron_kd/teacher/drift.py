"""How far two engines are apart on some samples, before either has captured them; of two caches see ``cache.drift``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_kd.cache.drift import DriftReport, DriftSums, row_drift, teachers_difference
from megatron_kd.data.samples import SampleSet
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.score import score_rows


def engine_drift(a: TeacherEngine, b: TeacherEngine, samples: SampleSet, ids: Sequence[int]) -> DriftReport:
    """Scores samples with both engines, one at a time, and compares their float32 answers: nothing is stored.

    Collective over the tensor-parallel group of either; every rank gets the report.

    Raises:
        ValueError: no ids.
        DataError: a sample that does not exist.
    """
    if not len(ids):
        raise ValueError("no samples to compare engines on")
    sums = DriftSums()
    for sample in ids:
        ours, theirs = (score_rows(engine, samples, [sample], np.float32)[0] for engine in (a, b))
        sums.add(sample, row_drift(ours, theirs))
    return sums.report(teachers_difference(a.identity(), b.identity()))
