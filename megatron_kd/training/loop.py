"""The training run, from the first iteration or the last checkpoint to the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.data.sampler import SampleOrder
from megatron_kd.data.steps import StepReader
from megatron_kd.device import (
    StopOnSignal,
    fail_together,
    on_any_rank,
)
from megatron_kd.errors import KDError, RemoteRankError
from megatron_kd.progress import progress
from megatron_kd.status import JobStatus
from megatron_kd.training.checkpoint import list_checkpoints
from megatron_kd.training.early_stopper import EarlyStopper
from megatron_kd.training.early_stopping import exhausted
from megatron_kd.training.guard import DivergedError
from megatron_kd.training.logs import log_to_file
from megatron_kd.training.measures import Measures
from megatron_kd.training.memory_report import out_of_memory_explained
from megatron_kd.training.metrics import MetricsWriter
from megatron_kd.training.periodic import evaluate_now
from megatron_kd.training.phases import Phases
from megatron_kd.training.profile import StepProfiler
from megatron_kd.training.resume import load_newest_checkpoint, newest_checkpoint
from megatron_kd.training.run_directory import STATUS_FILE, exclusive, open_run_directory, truncate_metrics
from megatron_kd.training.saver import Saver
from megatron_kd.training.session import Session, open_session
from megatron_kd.training.setup import build_student, wrap_for_training
from megatron_kd.training.step import train_step
from megatron_kd.training.watchdog import watching

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainReport:
    """How a run ended.

    Attributes:
        finished: all iterations are done, or no better ones were to be expected; False after a signal.
        reason: why it finished before ``training.train_iters``; None where it did not.
    """

    run_dir: Path
    iteration: int
    finished: bool
    resumed_from: int
    last: dict[str, float]
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**self.__dict__, "run_dir": str(self.run_dir)}


def train(recipe: Recipe, *, show_progress: bool = True) -> TrainReport:
    """Trains on this rank, resuming from the newest checkpoint of the run directory. Collective over all ranks.

    Raises:
        KDError: for anything wrong with recipe, data, cache or checkpoints: on every rank, before the first step
            where it can be known then.
    """
    session = open_session(recipe)
    run_dir = Path(recipe.run_dir)
    total = recipe.training.train_iters
    status = JobStatus(run_dir / STATUS_FILE if session.is_first else None, iteration=0, train_iters=total)
    with ExitStack() as held:
        with fail_together(f"opening {run_dir}"):
            if session.is_first:
                held.enter_context(exclusive(run_dir))
                saved = list_checkpoints(run_dir)
                # A call that finds nothing left to train leaves the record of what was trained alone.
                finished = bool(saved) and (
                    saved[-1][0] >= total or exhausted(recipe, run_dir, saved[-1][0]) is not None
                )
                open_run_directory(recipe, record=not finished)
                if not finished:
                    status.begin()
        dist.barrier()
        logs, rank = run_dir / "logs", dist.get_rank()
        log = log_to_file(logs / f"rank_{rank}.log", warn_on_terminal=session.is_first)
        phases = Phases()
        memory = out_of_memory_explained(recipe, phases, logs / f"memory_rank_{rank}.pickle")
        with StopOnSignal() as stop, log, status, watching(recipe, phases, logs / f"rank_{rank}.log", status), memory:
            report = _run(session, run_dir, stop, status, phases, show_progress)
            status.ends(finished=report.finished)
            return report


def _run(
    session: Session, run_dir: Path, stop: StopOnSignal, status: JobStatus, phases: Phases, show_progress: bool
) -> TrainReport:
    recipe, groups = session.recipe, session.groups
    with phases("set_up"):
        saved = newest_checkpoint(run_dir)
        student = wrap_for_training(recipe, groups, build_student(recipe, groups, with_weights=saved is None), phases)
        if saved is not None:
            saved = load_newest_checkpoint(student, recipe.student.model, groups, run_dir, recipe.checkpoint.on_damage)
            logger.info("resumed from %s", saved)
        start = student.iteration
        with fail_together(f"preparing {run_dir}"):
            if session.is_first:
                truncate_metrics(run_dir, start)
                status.update(iteration=start)
        dist.barrier()

    measures = Measures(session, phases)
    total = recipe.training.train_iters
    result: dict[str, float] = {}
    stopping = False
    evaluate_every = recipe.training.eval_interval
    with (
        MetricsWriter(recipe, run_dir, enabled=session.is_first) as writer,
        Saver(session, student, run_dir, status, writer, measures) as saver,
        step_reader(session).ahead(
            start, total, prefetch_batches=recipe.data.prefetch_batches, num_workers=recipe.data.num_workers
        ) as steps,
        progress(
            f"train {recipe.name}", max(total - start, 0), unit="steps", enabled=show_progress and session.is_first
        ) as advance,
        StepProfiler(recipe.profile, run_dir / "profile", dist.get_rank()) as profiler,
    ):
        stopper = EarlyStopper(session, student, run_dir, saver, status)
        # Due at the beginning, and where a run was killed between a checkpoint and its evaluation.
        if start == 0 or start >= total or (evaluate_every and start % evaluate_every == 0):
            evaluate_now(session, student, run_dir, writer, measures)
            stopper.look()
        phases.begin_memory()
        while student.iteration < total and stopper.reason is None:
            profiler.begin(student.iteration + 1)
            started = time.perf_counter()
            phases.begin_step()
            with phases("data"):
                batches, error, stopping, writing = _agree(steps, stop, writer, saver)
            if error is not None:
                # Every rank is here, at the same step, with good weights: what was learnt is kept.
                if student.iteration > start:
                    _keep(saver)
                raise error
            if not writing:
                saver.publish()
            if stopping:
                break
            try:
                done = train_step(recipe, student, session.distillation, groups, batches)
            except DivergedError:
                # On every rank, before anything was changed.
                if student.iteration > start:
                    _keep(saver)
                raise
            student.iteration += 1
            student.consumed_samples += recipe.training.global_batch_size
            student.tokens += done.tokens
            if student.iteration % recipe.logging.log_interval == 0 or student.iteration == total:
                result = measures.step(done, time.perf_counter() - started, steps.waited_s)
                writer.write(student.iteration, student.tokens, student.consumed_samples, result)
            advance(1, f"KD {done.metrics.get('loss/kd', math.nan):.4f}")
            if saver.is_due():
                saver.save()
            if evaluate_every and student.iteration % evaluate_every == 0 and student.iteration < total:
                evaluate_now(session, student, run_dir, writer, measures)
                stopper.look()
        if student.iteration > start:
            logger.info("saved %s", saver.save_now())
        if stopping:
            logger.warning(
                "stopped by %s after iteration %d", stop.received or "a signal on another rank", student.iteration
            )
        elif student.iteration > start:
            evaluate_now(session, student, run_dir, writer, measures)
            stopper.look()
        with fail_together(f"writing {writer.path}"):
            if writer.failure is not None:
                raise writer.failure
    if stopper.reason is not None:
        logger.warning("%s", stopper.reason)
    finished = student.iteration >= total or stopper.reason is not None
    return TrainReport(run_dir, student.iteration, finished, start, result, stopper.reason)


def step_reader(session: Session) -> StepReader:
    """What reads this rank's rows of each step."""
    recipe, groups = session.recipe, session.groups
    # Targets are looked up where the loss is: on the last stage.
    cached = session.cached if groups.is_last_stage else None
    order = SampleOrder(
        session.train_rows,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        global_batch_size=recipe.training.global_batch_size,
    )
    return StepReader(
        session.samples,
        cached,
        order,
        groups.dp_rank,
        groups.dp_size,
        recipe.training.micro_batch_size,
        groups.context,
    )


def _keep(saver: Saver) -> None:
    """A last checkpoint before all ranks end for another reason, which must not be hidden by one that the disk has."""
    try:
        saver.save_now()
    except (KDError, OSError) as error:
        logger.warning("%s", error)


def _agree(
    steps: Iterator[list[Batch]], stop: StopOnSignal, writer: MetricsWriter, saver: Saver
) -> tuple[list[Batch], Exception | None, bool, bool]:
    """The next batches, what failed on the way, whether to stop, and whether a checkpoint is still being written.

    One exchange, so that all ranks do the same. The error is returned, not raised: where one rank's rows or metrics
    failed, every rank gets one here, and all are still there to save. Raised is only what ends that.

    Raises:
        RemoteRankError: a rank died.
    """
    batches: list[Batch] = []
    error: Exception | None = writer.failure
    try:
        batches = next(steps)
    except Exception as caught:  # whatever it is, the others must hear of it: they would wait in the next collective
        error = caught
    failed, stopping, writing = on_any_rank([error is not None, stop.received is not None, saver.is_writing])
    if failed and error is None:
        error = RemoteRankError("reading the next rows or writing metrics failed on another rank; its message says why")
    return batches, error, stopping, writing
