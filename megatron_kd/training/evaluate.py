"""Evaluation on the held-out split: the divergence trained on, perplexity and agreement."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.prefetch import Prefetcher
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.unigram import fit_unigram, unigram_bucket_kl
from megatron_kd.device import current_device, fail_together, lost_ranks_reported
from megatron_kd.errors import DataError
from megatron_kd.files import write_json
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.progress import progress
from megatron_kd.targets import TopKTargets
from megatron_kd.training.distill import Distillation, Observer
from megatron_kd.training.heldout import HeldoutRows
from megatron_kd.training.sums import TokenSums, add_over_model

SPLIT = "heldout"
"""What evaluation reads of the samples."""

# Both parts are reported apart; any weight strictly between 0 and 1 has the pass compute both.
_BOTH = 0.5


@torch.no_grad()
@lost_ranks_reported()
def evaluate_model(
    model: torch.nn.Module,
    distillation: Distillation,
    samples: SampleSet,
    cached: CachedTargets | None,
    groups: ParallelGroups,
    micro_batch_size: int,
    *,
    num_workers: int = 1,
    show_progress: bool = False,
    on_micro_batch: Callable[[], None] = lambda: None,
    observe: Observer | None = None,
) -> dict[str, float]:
    """Means over the unmasked tokens of the held-out split. Collective over all ranks.

    Args:
        num_workers: threads that read ahead.
        on_micro_batch: called before each; a sign of life.
        observe: looks at each micro batch where the head is, such as ``EvaluationDetails.observe``.

    Returns:
        eval/kd (the recipe's divergence per token, over the top K and its tail, or over the whole vocabulary where the
        teacher hands that over; without the T² that scales the loss; in nats, of tvd a probability, so that figures
        of different divergences do not compare), eval/ce, eval/perplexity, eval/top1_agreement, eval/teacher_mass,
        eval/student_mass, eval/tokens. From a cache with temperature 1 also eval/forward_kl, which does compare, in
        nats: the forward KL with the bucket tail over all tokens that the cache keeps, at temperature 1, whatever the
        recipe trains on; and where the recipe's divergence is of that kind eval/unigram_kd: what a unigram model
        fitted on the training split scores on the same targets.

    Raises:
        DataError, CacheError: there is no held-out split, or one of its rows cannot be used; on every rank.
        RemoteRankError: another rank died.
    """
    with fail_together("evaluation"):
        ids = samples.splits.get(SPLIT)
        if not ids:
            raise DataError(f"{samples.path} has no held-out rows: set data.heldout_tokens and prepare again")
    whole = cached.as_captured() if cached is not None else None
    kd_is_it = (
        cached is not None and whole is not None and whole.top_k == cached.top_k and distillation.is_plain_bucket_kl
    )
    # Targets are looked up where the loss is.
    last = groups.is_last_stage
    rows = HeldoutRows(
        samples,
        cached if last else None,
        ids,
        micro_batch_size,
        groups.context,
        yardstick=whole if last and not kd_is_it else None,
    )
    portions = rows.portions(groups.dp_rank, groups.dp_size)
    unigram = None
    if cached is not None and distillation.is_plain_bucket_kl:
        counts = samples.token_counts("train", distillation.vocab_size, learned=samples.within_documents)
        unigram = fit_unigram(counts)
    was_training = model.training
    model.eval()
    parts: list[torch.Tensor] = []
    unigram_sum = 0.0
    with (
        Prefetcher(portions, rows.read, 2 * num_workers, num_workers) as ahead,
        progress("evaluate", len(portions), unit="batches", enabled=show_progress and groups.is_first_rank) as advance,
    ):
        for together in batched(portions, distillation.batches_together):
            with fail_together("reading the held-out rows"):
                batches = [next(ahead) for _ in together]
            parts += distillation.run(
                model,
                batches,
                seq_length=samples.seq_length,
                forward_only=True,
                mode="no_grad",
                ce_weight=_BOTH,
                on_micro_batch=on_micro_batch,
                observe=observe,
            )
            for batch in batches:
                if unigram is not None and batch.targets is not None:
                    unigram_sum += _unigram_sum(batch, batch.targets, unigram)
            advance(len(batches))
    model.train(was_training)
    sums = TokenSums.reduce(parts, groups, current_device())
    total = torch.tensor([unigram_sum], dtype=torch.float64, device=current_device())
    add_over_model(total, groups)
    tokens = sums["tokens"]
    ce = sums["ce"] / sums["labelled"]
    result = {
        "eval/kd": sums["kd"] / tokens / distillation.t2,
        "eval/ce": ce,
        "eval/perplexity": math.exp(min(ce, 700.0)),
        "eval/top1_agreement": sums["top1_agreement"] / tokens,
        "eval/teacher_mass": sums["teacher_mass"] / tokens,
        "eval/student_mass": sums["student_mass"] / tokens,
        "eval/tokens": tokens,
    }
    if whole is not None:
        result["eval/forward_kl"] = result["eval/kd"] if kd_is_it else sums["forward_kl"] / tokens
    if unigram is not None:
        result["eval/unigram_kd"] = float(total.item()) / tokens
    return result


def _unigram_sum(batch: Batch, targets: TopKTargets, unigram: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    kl = unigram_bucket_kl(
        targets.ids.cpu().numpy(), targets.logprobs.cpu().numpy(), targets.tail_logmass.cpu().numpy(), unigram
    )
    return float(kl[batch.token_weights.numpy() != 0].sum())


def evaluation_path(run_dir: Path, iteration: int) -> Path:
    """Where the evaluation of an iteration lies."""
    return run_dir / "evaluations" / f"iter_{iteration:07d}.json"


def write_evaluation(
    run_dir: Path, iteration: int, tokens: int, result: dict[str, Any], recipe: Recipe, *, from_cache: bool = True
) -> Path:
    """Keeps an evaluation, means and tables, beside the metrics of its run, with what it was measured by.

    Args:
        from_cache: on cached targets; False: on those of an online teacher.
    """
    path = evaluation_path(run_dir, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"iteration": iteration, "tokens": tokens, "measure": _measure_of(recipe, from_cache), **result})
    return path


def read_evaluation(
    run_dir: Path, iteration: int, recipe: Recipe, *, from_cache: bool = True
) -> dict[str, float] | None:
    """The evaluation kept for an iteration; None where there is none, or one measured by another recipe or targets."""
    try:
        kept = json.loads(evaluation_path(run_dir, iteration).read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(kept, dict) or kept.get("measure") != _measure_of(recipe, from_cache):
        return None
    return {name: value for name, value in kept.items() if name.startswith("eval/")}


def _measure_of(recipe: Recipe, from_cache: bool) -> str:
    """A hash of all that decides an evaluation: data, models, loss, whose targets (not how rows are read ahead, in how
    much memory the loss is computed, or where the teacher's weights lie)."""
    decisive = recipe.model_dump(
        mode="json",
        include={"data", "teacher", "student", "loss", "seed"},
        exclude={
            "loss": {"mode", "chunk_mib", "gradient_mib"},
            "teacher": {"parallelism", "offload"},
            "data": {"prefetch_batches", "num_workers"},
        },
    )
    if not from_cache:
        decisive["targets"] = "online"
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
