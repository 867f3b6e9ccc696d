"""The checkpoints that one call of ``train`` writes."""

from __future__ import annotations

from pathlib import Path

from megatron_kd.device import fail_together
from megatron_kd.status import JobStatus
from megatron_kd.training.checkpoint import save_checkpoint
from megatron_kd.training.run_directory import STATUS_FILE
from megatron_kd.training.session import Session
from megatron_kd.training.setup import Student


class Saver:
    """Saves a student into its run directory and says so in ``status.json``. Its methods are collective."""

    def __init__(self, session: Session, student: Student, run_dir: Path, status: JobStatus) -> None:
        self._session = session
        self._student = student
        self._run_dir = run_dir
        self._status = status

    def save(self) -> Path:
        """Saves the student as it is. Raises as ``save_checkpoint``."""
        recipe = self._session.recipe
        path = save_checkpoint(
            self._student, recipe.student.model, self._session.groups, self._run_dir, recipe.checkpoint.keep
        )
        with fail_together(f"writing {self._run_dir / STATUS_FILE}"):
            self._status.update(iteration=self._student.iteration)
        return path

    def is_due(self) -> bool:
        """Whether this iteration ends an interval of ``checkpoint.save_interval``."""
        every = self._session.recipe.checkpoint.save_interval
        return every is not None and self._student.iteration % every == 0
