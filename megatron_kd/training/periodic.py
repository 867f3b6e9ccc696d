"""Evaluation during training: where there are held-out rows, once an iteration."""

from __future__ import annotations

from pathlib import Path

from megatron_kd.device import any_rank, fail_together
from megatron_kd.training.evaluate import SPLIT, evaluate_model, read_evaluation, write_evaluation
from megatron_kd.training.evaluation_details import EvaluationDetails
from megatron_kd.training.measures import Measures
from megatron_kd.training.metrics import MetricsWriter
from megatron_kd.training.session import Session
from megatron_kd.training.setup import Student


def evaluate_now(session: Session, student: Student, run_dir: Path, writer: MetricsWriter, measures: Measures) -> None:
    """Evaluates where there are held-out rows, once an iteration; the result goes to the metrics and beside them.

    Collective over all ranks.
    """
    if not session.samples.splits.get(SPLIT):
        return
    from_cache = session.evaluation_cached is not None
    known = None
    if session.is_first:
        known = read_evaluation(run_dir, student.iteration, session.recipe, from_cache=from_cache)
    if not any_rank(session.is_first and known is None):
        if known is not None:
            writer.write_evaluation(student.iteration, student.tokens, student.consumed_samples, known)
        return
    details = None
    if session.recipe.training.eval_details:
        details = EvaluationDetails(session.recipe, session.evaluation, session.groups)
    with measures.between("evaluation") as spent:
        result = evaluate_model(
            student.bare,
            session.evaluation,
            session.samples,
            session.evaluation_cached,
            session.groups,
            session.recipe.training.micro_batch_size,
            num_workers=session.recipe.data.num_workers,
            on_micro_batch=student.phases.beat,
            observe=details.observe if details is not None else None,
        )
        means, tables = details.finish() if details is not None else ({}, {})
    result |= means
    with fail_together("writing the evaluation"):
        if session.is_first:
            kept = {**result, **tables}
            write_evaluation(run_dir, student.iteration, student.tokens, kept, session.recipe, from_cache=from_cache)
            line = {**result, **spent}
            writer.write_evaluation(student.iteration, student.tokens, student.consumed_samples, line)
