"""The checkpoints that one call of ``train`` writes."""

from __future__ import annotations

from pathlib import Path

from megatron_kd.device import fail_together
from megatron_kd.status import JobStatus
from megatron_kd.training.checkpoint import save_checkpoint
from megatron_kd.training.early_stopping import best_checkpoint
from megatron_kd.training.measures import Measures
from megatron_kd.training.metrics import MetricsWriter
from megatron_kd.training.run_directory import STATUS_FILE
from megatron_kd.training.session import Session
from megatron_kd.training.setup import Student


class Saver:
    """Saves a student into its run directory and says so in the metrics and ``status.json``. Collective."""

    def __init__(
        self,
        session: Session,
        student: Student,
        run_dir: Path,
        status: JobStatus,
        writer: MetricsWriter,
        measures: Measures,
    ) -> None:
        self._session = session
        self._student = student
        self._run_dir = run_dir
        self._status = status
        self._writer = writer
        self._measures = measures
        self._saved: int | None = None

    def save(self) -> Path:
        """Saves the student as it is; what it took becomes a line of the metrics. Raises as ``save_checkpoint``."""
        recipe, student = self._session.recipe, self._student
        policy = recipe.training.early_stopping
        best = best_checkpoint(self._run_dir, policy.min_delta) if policy and self._session.is_first else None
        with self._measures.between("checkpoint") as spent:
            path = save_checkpoint(
                student, recipe.student.model, self._session.groups, self._run_dir, recipe.checkpoint.keep, best
            )
        with fail_together(f"writing {self._run_dir / STATUS_FILE}"):
            self._status.update(iteration=student.iteration)
            if self._saved != student.iteration:
                self._writer.write(student.iteration, student.tokens, student.consumed_samples, spent)
        self._saved = student.iteration
        return path

    def is_due(self) -> bool:
        """Whether this iteration ends an interval of ``checkpoint.save_interval``."""
        every = self._session.recipe.checkpoint.save_interval
        return every is not None and self._student.iteration % every == 0
