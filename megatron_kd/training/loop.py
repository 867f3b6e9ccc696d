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
    reset_peak_memory,
)
from megatron_kd.errors import RemoteRankError
from megatron_kd.progress import progress
from megatron_kd.status import JobStatus
from megatron_kd.training.checkpoint import list_checkpoints
from megatron_kd.training.logs import log_to_file
from megatron_kd.training.measures import measure
from megatron_kd.training.metrics import MetricsWriter
from megatron_kd.training.periodic import evaluate_now
from megatron_kd.training.resume import load_newest_checkpoint, newest_checkpoint
from megatron_kd.training.run_directory import STATUS_FILE, exclusive, open_run_directory, truncate_metrics
from megatron_kd.training.saver import Saver
from megatron_kd.training.session import Session, open_session
from megatron_kd.training.setup import build_student, wrap_for_training
from megatron_kd.training.step import train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainReport:
    """How a run ended.

    Attributes:
        finished: all iterations are done; False after a signal.
    """

    run_dir: Path
    iteration: int
    finished: bool
    resumed_from: int
    last: dict[str, float]

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
                finished = bool(saved) and saved[-1][0] >= total
                open_run_directory(recipe, record=not finished)
                if not finished:
                    status.begin()
        dist.barrier()
        log = log_to_file(run_dir / "logs" / f"rank_{dist.get_rank()}.log", warn_on_terminal=session.is_first)
        with StopOnSignal() as stop, log, status:
            report = _run(session, run_dir, stop, status, show_progress)
            status.ends(finished=report.finished)
            return report


def _run(session: Session, run_dir: Path, stop: StopOnSignal, status: JobStatus, show_progress: bool) -> TrainReport:
    recipe, groups = session.recipe, session.groups
    saved = newest_checkpoint(run_dir)
    student = wrap_for_training(recipe, groups, build_student(recipe, groups, with_weights=saved is None))
    if saved is not None:
        saved = load_newest_checkpoint(student, recipe.student.model, groups, run_dir, recipe.checkpoint.on_damage)
        logger.info("resumed from %s", saved)
    start = student.iteration
    with fail_together(f"preparing {run_dir}"):
        if session.is_first:
            truncate_metrics(run_dir, start)
            status.update(iteration=start)
    dist.barrier()

    saver = Saver(session, student, run_dir, status)
    total = recipe.training.train_iters
    result: dict[str, float] = {}
    stopping = False
    evaluate_every = recipe.training.eval_interval
    with (
        MetricsWriter(recipe, run_dir, enabled=session.is_first) as writer,
        step_reader(session).ahead(
            start, total, prefetch_batches=recipe.data.prefetch_batches, num_workers=recipe.data.num_workers
        ) as steps,
        progress(
            f"train {recipe.name}", max(total - start, 0), unit="steps", enabled=show_progress and session.is_first
        ) as advance,
    ):
        # Due at the beginning, and where a run was killed between a checkpoint and its evaluation.
        if start == 0 or start >= total or (evaluate_every and start % evaluate_every == 0):
            evaluate_now(session, student, run_dir, writer)
        reset_peak_memory()
        while student.iteration < total:
            started = time.perf_counter()
            batches, error, stopping = _agree(steps, stop)
            if error is not None:
                # Every rank is here, at the same step, with good weights: what was learnt is kept.
                if student.iteration > start:
                    saver.save()
                raise error
            if stopping:
                break
            done = train_step(recipe, student, session.distillation, groups, batches)
            student.iteration += 1
            student.consumed_samples += recipe.training.global_batch_size
            student.tokens += done.tokens
            if student.iteration % recipe.logging.log_interval == 0 or student.iteration == total:
                result = measure(session, done, time.perf_counter() - started, steps.waited_s)
                writer.write(student.iteration, student.tokens, student.consumed_samples, result)
            advance(1, f"KD {done.metrics.get('loss/kd', math.nan):.4f}")
            if saver.is_due():
                saver.save()
                reset_peak_memory()  # the peak is that of training steps, whatever lies between them
            if evaluate_every and student.iteration % evaluate_every == 0 and student.iteration < total:
                evaluate_now(session, student, run_dir, writer)
                reset_peak_memory()
        if student.iteration > start:
            logger.info("saved %s", saver.save())
        if stopping:
            logger.warning(
                "stopped by %s after iteration %d", stop.received or "a signal on another rank", student.iteration
            )
        elif student.iteration > start:
            evaluate_now(session, student, run_dir, writer)
    return TrainReport(run_dir, student.iteration, student.iteration >= total, start, result)


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


def _agree(steps: Iterator[list[Batch]], stop: StopOnSignal) -> tuple[list[Batch], Exception | None, bool]:
    """The next batches, what failed on the way, and whether to stop: one exchange, so that all ranks do the same.

    The error is returned, not raised: where one rank's rows failed, every rank gets one here, and all are still there
    to save. Raised is only what ends that.

    Raises:
        RemoteRankError: a rank died.
    """
    batches: list[Batch] = []
    error: Exception | None = None
    try:
        batches = next(steps)
    except Exception as caught:  # whatever it is, the others must hear of it: they would wait in the next collective
        error = caught
    failed, stopping = on_any_rank([error is not None, stop.received is not None])
    if failed and error is None:
        error = RemoteRankError("reading the next rows failed on another rank; its message says why")
    return batches, error, stopping
