"""Early stopping within the loop: what all ranks do after an evaluation."""

from __future__ import annotations

from pathlib import Path

from megatron_kd.device import fail_together, first_rank_tells
from megatron_kd.errors import DataError
from megatron_kd.status import JobStatus
from megatron_kd.training.early_stopping import best_iteration, exhausted
from megatron_kd.training.evaluate import SPLIT
from megatron_kd.training.saver import Saver
from megatron_kd.training.session import Session
from megatron_kd.training.setup import Student


class EarlyStopper:
    """Keeps the best weights and says when a run is to end. Does nothing without ``training.early_stopping``.

    Attributes:
        reason: why the run ends here; None as long as it goes on. The same on every rank.
    """

    def __init__(self, session: Session, student: Student, run_dir: Path, saver: Saver, status: JobStatus) -> None:
        """Collective.

        Raises:
            DataError: there is nothing to evaluate on; on every rank.
        """
        self._session, self._student, self._run_dir = session, student, run_dir
        self._saver, self._status = saver, status
        self._enabled = session.recipe.training.early_stopping is not None
        self.reason: str | None = None
        if self._enabled:
            with fail_together("opening the held-out rows"):
                if not session.samples.splits.get(SPLIT):
                    raise DataError(
                        f"training.early_stopping needs held-out rows and {session.samples.path} has none: set "
                        "data.heldout_tokens and prepare again, or early_stopping to null"
                    )

    def look(self) -> None:
        """After the evaluation of this iteration: saves it if it is the best, and decides. Collective.

        What the first rank reads counts: the files of an evaluation are its own.
        """
        if not self._enabled:
            return
        recipe, iteration = self._session.recipe, self._student.iteration
        best, reason = first_rank_tells(
            "looking at the evaluations",
            lambda: (
                best_iteration(recipe, self._run_dir, iteration),
                exhausted(recipe, self._run_dir, iteration) if iteration < recipe.training.train_iters else None,
            ),
        )
        self.reason = reason
        if best == iteration > 0:
            self._saver.save()
        with fail_together("writing the status"):
            if best is not None:
                self._status.update(best_iteration=best)
            if reason is not None:
                self._status.update(reason=reason)
