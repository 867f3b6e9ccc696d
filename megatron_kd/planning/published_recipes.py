"""The recipes of published runs, as far as their figures tell them."""

from __future__ import annotations

from typing import Any

from megatron_kd.config import Recipe, load_model
from megatron_kd.models.flops import training_flops_per_token
from megatron_kd.planning.published_results import PublishedRun

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def implied_rows(run: PublishedRun, student: str, seq_length: int) -> float:
    """Rows of an iteration, from its seconds and TFLOP/s: tokens = TFLOP/s · GPUs · s / FLOPs of a token."""
    per_token = training_flops_per_token(load_model(student), seq_length)
    return run.tflops * 1e12 * run.gpus * run.seconds / per_token / seq_length


def eight_to_three(run: PublishedRun) -> Recipe:
    """The recipe of a run of ``EIGHT_TO_THREE``; whole layers recomputed, which its published peaks imply."""
    return _recipe(
        run,
        teacher="llama31_8b",
        student="llama32_3b",
        seq_length=8192,
        batch=_nearest_batch(implied_rows(run, "llama32_3b", 8192)),
        training=FULL,
    )


def gpt_oss(run: PublishedRun, **sections: Any) -> Recipe:
    """The recipe of a run of ``GPT_OSS``: TP 8 + SP and EP 8 unless ``sections`` say otherwise."""
    layout = {"tensor_model_parallel_size": 8, "expert_model_parallel_size": 8, "sequence_parallel": True}
    return _recipe(
        run,
        teacher="gpt_oss_120b",
        student="gpt_oss_20b",
        seq_length=32768,
        batch=_nearest_batch(implied_rows(run, "gpt_oss_20b", 32768)),
        parallelism=sections.get("parallelism", layout),
        training=sections.get("training", {}),
    )


def _recipe(
    run: PublishedRun,
    *,
    teacher: str,
    student: str,
    seq_length: int,
    batch: int,
    parallelism: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> Recipe:
    per_node = min(run.gpus, 8)
    source: dict[str, Any] = {"cache": "cache"} if run.mode == "offline" else {"checkpoint": "teacher"}
    return Recipe.model_validate(
        {
            "name": f"{student}_{run.mode}_{run.implementation}",
            "cluster": {"nodes": run.gpus // per_node, "gpus_per_node": per_node, "gpu": "h200"},
            "data": {"samples": "samples", "seq_length": seq_length},
            "teacher": {"mode": run.mode, "model": load_model(teacher).model_dump(), **source},
            "student": {"model": load_model(student).model_dump()},
            "parallelism": parallelism or {},
            "loss": {"implementation": run.implementation},
            "training": {"global_batch_size": batch, "train_iters": 1000, **(training or {})},
            "optimizer": {"lr": 1e-5},
        }
    )


def _nearest_batch(rows_implied: float) -> int:
    """The power of two that is meant: reported FLOPs differ by a few per cent from ours."""
    return int(min((2**n for n in range(10)), key=lambda batch: abs(batch - rows_implied)))
