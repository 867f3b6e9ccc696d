"""The checkpoints that one call of ``train`` writes."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType

from megatron_kd.daemons import DaemonThreads
from megatron_kd.device import any_rank, fail_together
from megatron_kd.status import JobStatus
from megatron_kd.training.checkpoint import BegunCheckpoint, checkpoint_path, is_saved, remove
from megatron_kd.training.early_stopping import protected_checkpoint
from megatron_kd.training.measures import Measures
from megatron_kd.training.metrics import MetricsWriter
from megatron_kd.training.run_directory import STATUS_FILE
from megatron_kd.training.session import Session
from megatron_kd.training.setup import Student

_STILL_WRITING_S = 2.0


class Saver:
    """Saves a student into its run directory and says so in the metrics and ``status.json``.

    Files are written in a thread, one checkpoint at a time. With ``checkpoint.async_save`` the training goes on
    meanwhile; the checkpoint gets its name in the first step before which all ranks have written theirs. All methods
    are collective, and raise ``CheckpointError``, ``OSError`` or ``RemoteRankError`` as ``BegunCheckpoint``, each on
    every rank: also for the checkpoint that was begun before.
    """

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
        # Daemons: a rank that must end does not wait for a disk that does not answer.
        self._threads = DaemonThreads(1, "checkpoint")
        self._begun: tuple[BegunCheckpoint, Future[None]] | None = None
        self._removed: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for nothing: where a checkpoint was begun and not finished, ranks do not all get here."""
        self._threads.close(timeout_s=0.0)

    def save(self) -> None:
        """Saves the student as it is; with ``checkpoint.async_save`` returns when that may change again."""
        self._begin(in_background=self._session.recipe.checkpoint.async_save)

    def save_now(self) -> Path:
        """Saves the student as it is, and waits until all is written, and removed what is too old."""
        self._begin(in_background=False)
        self._await_removal()
        return checkpoint_path(self._run_dir, self._student.iteration)

    def is_due(self) -> bool:
        """Whether this iteration ends an interval of ``checkpoint.save_interval``."""
        every = self._session.recipe.checkpoint.save_interval
        return every is not None and self._student.iteration % every == 0

    @property
    def is_writing(self) -> bool:
        """Whether this rank has not written its part of the checkpoint that was begun. Not collective."""
        return self._begun is not None and not self._begun[1].done()

    def finish(self) -> None:
        """Waits for the checkpoint that was begun, if one was, and publishes it."""
        if self._begun is None:
            return
        # A slow disk may take longer than a collective may wait; a rank that dies is heard of at once.
        wait([self._begun[1]], _STILL_WRITING_S)
        while any_rank(self.is_writing):
            self._student.phases.beat()
            wait([self._begun[1]], _STILL_WRITING_S)
        self.publish()

    def publish(self) -> None:
        """Publishes the checkpoint that was begun, if one was, of which no rank ``is_writing`` any more."""
        if self._begun is None:
            return
        (begun, written), self._begun = self._begun, None
        written.result()
        recipe = self._session.recipe
        with self._student.phases("checkpoint"):
            with fail_together("looking for the best checkpoint"):
                best = protected_checkpoint(recipe, self._run_dir, begun.iteration) if self._session.is_first else None
            left = begun.publish(recipe.checkpoint.keep, best)
            self._removed = self._threads.submit(remove, left)
            with fail_together(f"writing {self._run_dir / STATUS_FILE}"):
                self._status.update(iteration=begun.iteration)

    def _begin(self, *, in_background: bool) -> None:
        """What training waits for becomes a line of the metrics."""
        student, model, groups = self._student, self._session.recipe.student.model, self._session.groups
        with self._measures.between("checkpoint") as spent:
            self.finish()
            self._await_removal()  # of what may have the name that this one is written under
            due = not is_saved(self._run_dir, student.iteration)
            if due:
                begun = BegunCheckpoint(student, model, groups, self._run_dir, detached=in_background)
                self._begun = begun, self._threads.submit(begun.write)
                if not in_background:
                    self.finish()
        if due:
            self._writer.write(student.iteration, student.tokens, student.consumed_samples, spent)

    def _await_removal(self) -> None:
        if self._removed is not None:
            wait([self._removed])
