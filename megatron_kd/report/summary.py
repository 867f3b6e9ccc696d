"""The figures of one run that a comparison shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_kd.config import recipe_differences
from megatron_kd.report.curves import Clock
from megatron_kd.report.runs import RunRecord, number

ALWAYS_DIFFERENT = {"name", "run_dir"}
EXPERTS = "expert_model_parallel_size"
AXES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    EXPERTS: "EP",
}
"""Keys of the recipe's parallelism and their usual abbreviations."""


@dataclass(frozen=True)
class RunSummary:
    """One column of the comparison; None stands for what the run did not record.

    ``*_before`` and ``*_after`` are of the first and the last evaluation on the held-out split. KD is per token, in
    nats but for tvd.
    """

    label: str
    directory: str
    name: str | None
    method: str | None
    targets: str | None
    layout: str | None
    iterations: int | None
    tokens: int | None
    step_time_s: float | None
    """Median over the logged iterations."""
    tokens_per_s: float | None
    """Median over the logged iterations, all ranks together."""
    tflops_per_gpu: float | None
    """Of the student; median over the logged iterations."""
    tflops_per_gpu_with_teacher: float | None
    """With the teacher's forward pass where it runs in the step."""
    gpu_hours: float | None
    """Of the training steps, all ranks together."""
    gpu_hours_to_target: float | None
    """The same until the run was first at the target of the comparison."""
    final_kd: float | None
    """Last value of the curve that the target is looked up on."""
    peak_memory_gib: float | None
    """Highest of any rank and iteration."""
    cache_wait_s: float | None
    """Median time that a step waited for its targets."""
    train_kd_first: float | None
    train_kd_last: float | None
    heldout_kd_before: float | None
    heldout_kd_after: float | None
    heldout_kd_factor: float | None
    """before / after: how many times smaller the divergence became."""
    heldout_forward_kl_before: float | None
    """Forward KL over all cached tokens at temperature 1, whatever the run trained on."""
    heldout_forward_kl_after: float | None
    unigram_kd: float | None
    """Held-out KD of a unigram model fitted on the training split."""
    perplexity_before: float | None
    perplexity_after: float | None
    agreement_before: float | None
    """Fraction of held-out positions at which student and teacher prefer the same token."""
    agreement_after: float | None
    git_revision: str | None


def summarize(
    run: RunRecord, label: str, hours_to_target: float | None = None, final_kd: float | None = None
) -> RunSummary:
    """The figures of a run. Never raises: what is missing is None."""
    kd_before, kd_after = _before_after(run, "eval/kd")
    forward_before, forward_after = _before_after(run, "eval/forward_kl")
    perplexity_before, perplexity_after = _before_after(run, "eval/perplexity")
    agreement_before, agreement_after = _before_after(run, "eval/top1_agreement")
    train_kd = _values(run.metrics, "kd")
    unigram = _values(run.evaluations, "eval/unigram_kd")
    per_rank, world = _median(run, "perf/tokens_per_s_per_gpu"), run.world_size()
    return RunSummary(
        label=label,
        directory=run.place,
        name=_text(run.setting("name")),
        method=method(run),
        targets=targets(run),
        layout=layout(run),
        iterations=_last_count(run.metrics, "iteration"),
        tokens=_last_count(run.metrics, "tokens"),
        step_time_s=_median(run, "perf/step_time_s"),
        tokens_per_s=per_rank * world if per_rank is not None and world is not None else None,
        tflops_per_gpu=_median(run, "perf/tflops_per_gpu"),
        tflops_per_gpu_with_teacher=_median(run, "perf/tflops_per_gpu_with_teacher"),
        gpu_hours=Clock(run).total,
        gpu_hours_to_target=hours_to_target,
        final_kd=final_kd,
        peak_memory_gib=max(_values(run.metrics, "memory/peak_gib"), default=None),
        cache_wait_s=_median(run, "data/cache_wait_s"),
        train_kd_first=train_kd[0] if train_kd else None,
        train_kd_last=train_kd[-1] if train_kd else None,
        heldout_kd_before=kd_before,
        heldout_kd_after=kd_after,
        heldout_kd_factor=kd_before / kd_after if kd_before is not None and kd_after else None,
        heldout_forward_kl_before=forward_before,
        heldout_forward_kl_after=forward_after,
        unigram_kd=unigram[-1] if unigram else None,
        perplexity_before=perplexity_before,
        perplexity_after=perplexity_after,
        agreement_before=agreement_before,
        agreement_after=agreement_after,
        git_revision=_text(run.environment.get("git_revision")),
    )


def method(run: RunRecord) -> str | None:
    """Training method as the recipe has it, such as "offline fused" or "online dense"."""
    mode, implementation = _text(run.setting("teacher.mode")), _text(run.setting("loss.implementation"))
    if mode is None:
        return None
    return f"{mode} {implementation.replace('_', '-')}" if implementation else mode


def targets(run: RunRecord) -> str | None:
    """What the teacher hands over: its full distribution, or its top K."""
    kind, top_k = run.setting("teacher.targets"), run.setting("teacher.top_k")
    if kind == "full":
        return "full distribution"
    return f"top {top_k}" if top_k is not None else None


def layout(run: RunRecord) -> str | None:
    """Ranks and how they share the work, such as "3 × cpu, TP 3 + SP"."""
    world = run.world_size()
    if world is None:
        return None
    parts = [f"{world} × {run.setting('cluster.gpu') or 'unknown device'}", *_sharing(run)]
    model_parallel = math.prod(run.setting(f"parallelism.{key}") or 1 for key in AXES if key != EXPERTS)
    if world > model_parallel:
        parts.append(f"DP {world // model_parallel}")
    return ", ".join(parts)


def hours_name(runs: Sequence[RunRecord]) -> str:
    """What the time of a rank is called: on a CPU there are no GPU-hours."""
    gpus = {run.setting("cluster.gpu") for run in runs} - {None}
    return "rank-hours" if gpus == {"cpu"} else "GPU-hours"


def _sharing(run: RunRecord) -> list[str]:
    """How the model is split, as one text such as "TP 3 + SP"; none where it is whole."""
    sizes = [(short, run.setting(f"parallelism.{key}") or 1) for key, short in AXES.items()]
    split = [f"{short} {size}" for short, size in sizes if size != 1]
    if run.setting("parallelism.sequence_parallel"):
        split.append("SP")
    return [" + ".join(split)] if split else []


def setting_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Every setting that is not the same in all recipes, but name and run_dir, with its value in each run."""
    known = [run for run in runs if run.recipe]
    if not known:
        return []
    first = known[0].recipe
    keys = {key for run in known[1:] for key, _, _ in recipe_differences(first, run.recipe)}
    return [(key, [run.setting(key) for run in runs]) for key in sorted(keys - ALWAYS_DIFFERENT)]


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Short labels, one a run, all distinct.

    The first of these that tells the runs apart: the methods, also with how the models are split, also with the whole
    layouts, the one setting that differs, the names, the last parts of the directories.
    """
    choices = [
        [method(run) for run in runs],
        [", ".join([name, *_sharing(run)]) if (name := method(run)) else None for run in runs],
        [f"{method(run)}, {layout(run)}" if method(run) and layout(run) else None for run in runs],
    ]
    differences = setting_differences(runs)
    if len(differences) == 1:
        key, values = differences[0]
        choices.append([f"{key.rpartition('.')[2]} {value}" for value in values])
    choices.append([_text(run.setting("name")) for run in runs])
    choices.append([run.place.rstrip("/").rpartition("/")[2] for run in runs])
    for choice in choices:
        texts = [text for text in choice if text]
        if len(texts) == len(runs) and len(set(texts)) == len(runs):
            return texts
    return [run.place for run in runs]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [value for row in rows if (value := number(row.get(key))) is not None]


def _median(run: RunRecord, key: str) -> float | None:
    values = _values(run.metrics, key)
    return median(values) if values else None


def _last_count(rows: Sequence[dict[str, Any]], key: str) -> int | None:
    values = _values(rows, key)
    return int(values[-1]) if values else None


def _before_after(run: RunRecord, key: str) -> tuple[float | None, float | None]:
    """First and last evaluation; a single one is "before" at iteration 0 and "after" later."""
    rows = [row for row in run.evaluations if number(row.get(key)) is not None]
    if not rows:
        return None, None
    if len(rows) == 1:
        value = number(rows[0][key])
        return (value, None) if number(rows[0]["iteration"]) == 0 else (None, value)
    return number(rows[0][key]), number(rows[-1][key])
