"""The verdict on one step, with the rows it is about."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.device import gather_arrays
from megatron_kd.training.guard import Fault
from megatron_kd.training.setup import Student
from megatron_kd.training.sums import FIELDS

SHOWN = 8
logger = logging.getLogger(__name__)


class Judge:
    """Asks the student's guard about one step and says what came of it.

    Attributes:
        skipped: the step was not taken.
    """

    def __init__(self, recipe: Recipe, student: Student, parts: Sequence[Tensor], batches: Sequence[Batch]) -> None:
        """``parts``: the ``TokenSums`` of each of this rank's micro batches; none before the last stage."""
        self._policy = recipe.training
        self._samples = recipe.data.samples
        self._student = student
        self._parts, self._batches = parts, batches
        self.skipped = False

    def allows(self, totals: Mapping[str, float], norm: float) -> bool:
        """Whether the update may be made. Every rank must have the same figures; collective where it may not.

        Raises:
            DivergedError: the run ends here, on every rank with the same message.
        """
        guard = self._student.guard
        # A batch of masked rows alone has no loss, and a gradient of zeros.
        loss = totals["total"] / totals["tokens"] if totals["tokens"] else 0.0
        fault = guard.fault(self._policy, loss, norm)
        if fault is None:
            guard.taken(self._policy, loss)
            return True
        where = f"iteration {self._student.iteration + 1}{self._rows(fault)}"
        guard.skip(self._policy, where, fault)
        self.skipped = True
        logger.warning("%s: %s; skipped, the %d. in all", where, fault.reason, guard.skipped_steps)
        return False

    def _rows(self, fault: Fault) -> str:
        """The rows at fault over all ranks, where single ones are; this rank's log gets all of its own. Collective."""
        own = sorted({row for batch in self._batches for row in batch.sample_ids})
        logger.warning("rows of this rank in iteration %d: %s", self._student.iteration + 1, own)
        limit = self._student.guard.spike_limit(self._policy)
        suspects: list[int] = []
        for sums, batch in zip(self._parts, self._batches, strict=bool(self._parts)):
            found = dict(zip(FIELDS, sums.tolist(), strict=True))
            loss = found["total"] / found["tokens"] if found["tokens"] else 0.0
            if not math.isfinite(loss) or (fault.finite and loss > limit):
                suspects += batch.sample_ids
        rows = sorted({int(row) for part in gather_arrays(np.array(suspects, dtype=np.int64)) for row in part})
        if not rows:
            return ""
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return f", rows {', '.join(map(str, rows[:SHOWN]))}{more} of {self._samples}"
