"""Predictions beside published results, and the layouts that fit, as the tables of docs/plan.md.

Every figure is computed when it is asked for: ``megatron-kd plan --published`` prints what the page holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_kd.config import load_model
from megatron_kd.config.gpus import GPUS
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.loss_time import loss_time
from megatron_kd.planning.loss_workspace import LossShape, loss_workspace
from megatron_kd.planning.plan import plan_recipe
from megatron_kd.planning.published_recipes import eight_to_three, gpt_oss, implied_rows
from megatron_kd.planning.published_results import (
    EIGHT_TO_THREE,
    GPT_OSS,
    ITERATION_PEAK_GB,
    LOSS_ALONE,
    LOSS_HIDDEN,
    LOSS_TOP_K,
    LOSS_VOCAB,
    TEACHER_TENSOR_GB,
    PublishedFigure,
    PublishedRun,
)

GB = 1e9
# The published fused loss projects a second time in backward, as the mode recompute does.
PUBLISHED_MODE = "recompute"


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        row: of the list of published results.
        published, predicted: numbers, in ``unit``; None where there is none.
        out_of_memory: that is what is published.
        why: of the difference.
    """

    row: int
    what: str
    unit: str
    published: float | None
    predicted: float
    why: str = ""
    out_of_memory: bool = False

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        return self.predicted / self.published if self.published else None


def published_rows() -> list[dict[str, Any]]:
    """The rows for ``--json``."""
    return [{**asdict(row), "ratio": row.ratio} for row in rows()]


def rows() -> list[Row]:
    """All claims that arithmetic can speak of."""
    return [*_one_tensor(), *_eight_to_three(), *_loss_alone(), *_gpt_oss(), *_cache_reused()]


def _one_tensor() -> list[Row]:
    model = load_model("gpt_oss_120b")
    tokens = 4 * 32768
    tensor = tokens * model.vocab_size * 2 / GB
    one_copy = 2 * tensor
    peaks = {
        name: loss_workspace(
            LossShape(tokens, tokens, model.hidden_size, model.vocab_size, 1, False, 100, None, 2, on_cpu=False),
            name,
            "single_pass",
            None,
        ).peak
        / GB
        for name in ("dense", "forward_chunked", "fused")
    }
    between = ITERATION_PEAK_GB["dense"] - ITERATION_PEAK_GB["fused"]
    return [
        Row(1, "teacher's probabilities, 4 × 32,768 tokens, bf16", "GB", TEACHER_TENSOR_GB, tensor, "rounded there"),
        Row(
            1,
            "dense less fused, peak of an iteration",
            "GB",
            between,
            peaks["dense"] - peaks["fused"],
            f"published: {between / one_copy:.1f} float32 copies of the logits ({one_copy:.0f} GB each), so that "
            "iteration splits its head or rows; ours is one rank with all four rows at once, where our reference "
            "keeps 6 copies, being the oracle of the tests and not tuned",
        ),
        Row(
            1,
            "the loss alone, fused, the same rows",
            "GB",
            None,
            peaks["fused"],
            "the published 128 GB are a whole iteration; how much of it is model is not said",
        ),
    ]


def _eight_to_three() -> list[Row]:
    found = []
    for run in EIGHT_TO_THREE:
        recipe = eight_to_three(run)
        plan = plan_recipe(recipe)
        name = f"8B → 3.2B, {run.mode} {run.implementation}"
        batch = recipe.training.global_batch_size
        reference = run.implementation != "fused"
        why = {
            ("dense", "online"): "our online reference keeps 13 float32 copies of [N, V] for the oracle's formulas",
            ("dense", "offline"): "ours keeps 6 copies of [N, V], the published about 5",
            ("forward_chunked", "offline"): "up to three dW beside the logits",
        }.get((run.implementation, run.mode), "nearly all of it weights, gradients and optimizer: 18 bytes a parameter")
        # What torch counts as allocated; a context and NCCL's buffers are not in it.
        tensors = (plan.memory.total - plan.memory.parts["reserve"]) / GIB
        found.append(Row(2, f"{name}: peak of tensors", "GiB", run.peak_gb, tensors, why))
        found.append(
            Row(
                2,
                f"{name}: iteration",
                "s",
                run.seconds,
                plan.step.seconds,
                (
                    "elementwise passes of the reference over float32 logits are estimated, see Efficiencies; "
                    if reference
                    else "three projections for four, dH and dW in the forward pass; "
                )
                + f"batch {batch} (implied: {implied_rows(run, 'llama32_3b', 8192):.1f})",
            )
        )
        found.append(Row(2, f"{name}: per GPU", "TFLOP/s", run.tflops, plan.step.tflops_per_gpu, "as the iteration"))
    return found


def _loss_shape(tokens: int) -> LossShape:
    return LossShape(tokens, tokens, LOSS_HIDDEN, LOSS_VOCAB, 1, False, LOSS_TOP_K, None, 2, on_cpu=False)


def _loss_peak(figure: PublishedFigure, mode: str) -> float:
    shape = _loss_shape(figure.tokens)
    inputs = (figure.tokens + LOSS_VOCAB) * LOSS_HIDDEN * 2 + figure.tokens * (6 * LOSS_TOP_K + 4)
    return (loss_workspace(shape, figure.implementation, mode, None).peak + inputs) / GIB


def _loss_alone() -> list[Row]:
    found = []
    for figure in LOSS_ALONE:
        what = f"loss alone, {figure.implementation}, {figure.tokens // 1024}K tokens: peak with inputs"
        peak = _loss_peak(figure, PUBLISHED_MODE)
        if figure.out_of_memory:
            limit = GPUS["h200"].memory_gib
            verdict = "does not fit" if peak > limit else "fits"
            found.append(Row(3, what, "GiB", None, peak, f"{verdict} with {limit:.1f} GiB", True))
            continue
        why = {
            "dense": "our reference keeps 6 float32 copies of the logits, the published about 5",
            "forward_chunked": "one float32 copy of the logits, as there; up to three dW beside it",
            "fused": "chunks of 1.5 GiB by default, dW in float32",
        }[figure.implementation]
        found.append(Row(3, what, "GiB", figure.peak_gib, peak, why))
    single = next(f for f in LOSS_ALONE if f.implementation == "fused" and f.tokens == 256 * 1024)
    what = "loss alone, fused in a single pass, 256K tokens: peak with inputs"
    why = "no tiles and no saved normalisers; dH and dW are there before backward"
    found.append(Row(3, what, "GiB", single.peak_gib, _loss_peak(single, "single_pass"), why))
    gpu = GPUS["h200"]
    shape = _loss_shape(256 * 1024)
    seconds = {
        name: loss_time(shape, name, PUBLISHED_MODE, loss_workspace(shape, name, PUBLISHED_MODE, None), gpu).seconds
        for name in ("forward_chunked", "fused")
    }
    published = next(f for f in LOSS_ALONE if f.implementation == "forward_chunked").time_over_fused
    found.append(
        Row(
            3,
            "forward_chunked over fused, 256K tokens: time",
            "×",
            published,
            seconds["forward_chunked"] / seconds["fused"],
            "fused recomputes here, four projections for three; our forward_chunked shares its row kernels, the "
            "published one is plain autograd",
        )
    )
    return found


def _gpt_oss() -> list[Row]:
    online, offline = GPT_OSS
    plans = {run.mode: plan_recipe(gpt_oss(run)) for run in GPT_OSS}
    fused_online = plan_recipe(gpt_oss(PublishedRun("fused", "online", online.gpus, online.seconds, online.tflops)))
    batches = {run.mode: implied_rows(run, "gpt_oss_20b", 32768) for run in GPT_OSS}
    found = []
    for run in GPT_OSS:
        plan = plans[run.mode]
        nodes, batch = run.gpus // 8, plan.recipe.training.global_batch_size
        name = f"GPT-OSS 20B at 32K, {run.mode}, {nodes} node{'s' if nodes > 1 else ''}, {run.implementation}"
        why = f"implied batch: {batches[run.mode]:.1f} rows, so {batch}; TP 8 + SP, EP 8"
        if run.mode == "online":
            slower = run.seconds / plan.step.seconds
            why += (
                f"; the published run is {slower:.1f} × slower than this arithmetic: its loss (dense is assumed), "
                "layout, recomputation and how the teacher ran are not said"
                if slower > 1
                else "; float32 products of our reference"
            )
        found.append(Row(4, f"{name}: step", "s", run.seconds, plan.step.seconds, why))
        found.append(Row(4, f"{name}: per GPU", "TFLOP/s", run.tflops, plan.step.tflops_per_gpu, "as the step"))
    found.append(
        Row(
            4,
            "the same online with our fused loss: step",
            "s",
            None,
            fused_online.step.seconds,
            "the whole distribution of the teacher, chunk by chunk",
        )
    )
    found.append(
        Row(
            4,
            "online over offline, step",
            "×",
            online.seconds / offline.seconds,
            plans["online"].step.seconds / plans["offline"].step.seconds,
            f"with our fused loss online it would be {fused_online.step.seconds / plans['offline'].step.seconds:.1f}",
        )
    )
    return found


def _cache_reused() -> list[Row]:
    plan = plan_recipe(gpt_oss(GPT_OSS[1]))
    online = plan_recipe(gpt_oss(PublishedRun("fused", "online", 8, GPT_OSS[1].seconds, GPT_OSS[1].tflops)))
    teacher = online.step.parts["teacher"] * online.recipe.training.train_iters * online.recipe.world_size / 3600
    tokens = plan.cache.tokens / 1e9
    return [
        Row(7, f"cache of {tokens:.2f} billion tokens", "GB", None, plan.cache.bytes / GB, "K 100, written once"),
        Row(7, "its capture", "GPU-hours", None, plan.capture_hours, "once"),
        Row(7, "the teacher within the steps of every online run", "GPU-hours", None, teacher, "each time"),
    ]


def published_markdown() -> str:
    """Both tables of docs/plan.md: the claims, and the layouts that fit."""
    from megatron_kd.planning.layouts_table import layouts_markdown

    lines = ["| row | what | published | predicted | ratio | why they differ |", "|---|---|---|---|---|---|"]
    for row in rows():
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        published = "out of memory" if row.out_of_memory else ""
        if row.published is not None:
            published = f"{row.published:.4g} {row.unit}"
        lines.append(f"| {row.row} | {row.what} | {published} | {row.predicted:.4g} {row.unit} | {ratio} | {row.why} |")
    lines += [
        "",
        "Rows 5 and 6 (accuracy of the student on benchmarks, ablations of losses and packing) are no matter of "
        "arithmetic. Peaks of row 2 are published in GB; read as GiB, in which torch reports them, the fused one is "
        "the predicted one.",
        "",
        layouts_markdown(),
    ]
    return "\n".join(lines)
