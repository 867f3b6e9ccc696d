"""A plan as people read it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_kd.planning.advice import remedies
from megatron_kd.planning.efficiency import GIB, USABLE
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.plan import Plan
from megatron_kd.planning.recomputation import Recomputation
from megatron_kd.planning.suggest import Suggestion
from megatron_kd.planning.teacher import has_own_layout, teacher_layout

MOMENTS = {
    "loss": "while its loss is computed",
    "backward": "while its last layer goes backward",
    "teacher": "while the teacher runs",
}
SHOWN = 8


def describe(plan: Plan) -> str:
    """The whole plan."""
    return "\n".join([*_heading(plan), "", *_memory(plan), "", *_time(plan), "", *_storage(plan)])


def layout_words(layout: Layout, recomputation: Recomputation) -> str:
    """Such as ``TP 8 + SP, EP 8, DP 1, recomputing moe_act``."""
    words = [f"TP {layout.tp}{' + SP' if layout.sequence_parallel else ''}"]
    sizes = (("PP", layout.pp), ("VP", layout.vp), ("CP", layout.cp), ("EP", layout.ep))
    words += [f"{name} {size}" for name, size in sizes if size > 1]
    words.append(f"DP {layout.dp}")
    if recomputation.granularity == "full":
        words.append("recomputing all layers" if recomputation.method == "uniform" else "recomputing some layers")
    elif recomputation.granularity == "selective":
        words.append("recomputing " + " ".join(recomputation.modules))
    return ", ".join(words)


def _heading(plan: Plan) -> list[str]:
    recipe, layout = plan.recipe, Layout.of(plan.recipe)
    where = f"{recipe.cluster.nodes} × {recipe.cluster.gpus_per_node} × {recipe.cluster.gpu}"
    teacher = f"{recipe.teacher.model.name} {recipe.teacher.mode}"
    lines = [
        f"{recipe.name}: {teacher} → {recipe.student.model.name}, {recipe.loss.implementation} loss, {where}",
        f"{layout_words(layout, Recomputation.of(recipe))}; {layout.microbatches} micro "
        f"batch{'' if layout.microbatches == 1 else 'es'} of "
        f"{layout.micro_rows} × {layout.row_tokens:,} tokens",
    ]
    if has_own_layout(recipe):
        lines.append(f"the teacher in its own layout: {layout_words(teacher_layout(recipe), Recomputation())}")
    return lines


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    stage = f" of stage {memory.stage}" if plan.recipe.parallelism.pipeline_model_parallel_size > 1 else ""
    lines = [f"memory of the fullest rank{stage}, {MOMENTS[memory.moment]} (GiB)"]
    lines += [f"  {name.replace('_', ' '):<18} {size / GIB:>8.2f}" for name, size in memory.parts.items() if size]
    lines.append(f"  {'total':<18} {memory.total / GIB:>8.2f}{_verdict(plan)}")
    if not memory.fits:
        lines += _why_not(plan)
    lines.append(f"  {'host, per rank':<18} {memory.host_prefetch / GIB:>8.2f}  read ahead")
    if memory.host_teacher:
        lines.append(f"  {'':<18} {memory.host_teacher / GIB:>8.2f}  the teacher's weights, pinned")
    if memory.host_optimizer:
        lines.append(f"  {'host, per rank':<18} {memory.host_optimizer / GIB:>8.2f}  optimizer, offloaded")
    return lines


def _verdict(plan: Plan) -> str:
    memory = plan.memory
    if math.isinf(memory.limit):
        return ""
    left = (memory.limit - memory.total) / GIB
    whole = memory.limit / USABLE / GIB
    of = f"  of {memory.limit / GIB:.1f} ({USABLE:.0%} of a {plan.recipe.cluster.gpu}'s {whole:.1f})"
    return f"{of}: fits, {left:.1f} left" if left >= 0 else f"{of}: does NOT fit, {-left:.1f} too much"


def _why_not(plan: Plan) -> list[str]:
    name, size = max(
        ((name, size) for name, size in plan.memory.parts.items() if name != "reserve"), key=lambda part: part[1]
    )
    lines = [f"  largest part: {name.replace('_', ' ')}, {size / GIB:.1f} GiB"]
    for words, changed in remedies(plan.recipe):
        verdict = "fits" if changed.memory.fits else "is less, but does not fit"
        lines.append(f"  with {words}: {changed.memory.total / GIB:.1f} GiB, {verdict}")
    lines.append("  other layouts: --suggest")
    return lines


def _time(plan: Plan) -> list[str]:
    step = plan.step
    lines = ["time of a step (s)"]
    lines += [f"  {name.replace('_', ' '):<18} {value:>8.3f}" for name, value in step.parts.items() if value]
    lines.append(
        f"  {'step':<18} {step.seconds:>8.3f}  {step.tokens_per_s:,.0f} tokens/s, {step.tflops_per_gpu:.3g} TFLOP/s "
        f"per {_rank(plan)} (the student's){_mfu(plan)}"
    )
    return lines


def _rank(plan: Plan) -> str:
    return "rank" if plan.recipe.cluster.gpu == "cpu" else "GPU"


def _mfu(plan: Plan) -> str:
    return "" if plan.recipe.cluster.gpu == "cpu" else f", MFU {plan.step.mfu:.1%}"


def _storage(plan: Plan) -> list[str]:
    cache = plan.cache
    rate = _shown(cache.bytes_per_token * plan.step.tokens_per_s / 1e6)
    return [
        f"cache: {_shown(cache.bytes / 1e9)} GB for {cache.tokens:,} tokens at {cache.bytes_per_token:.0f} bytes; "
        f"{'read' if plan.recipe.teacher.mode == 'offline' else 'offline it would be read'} at {rate} MB/s",
        f"{_rank(plan)}-hours: {_shown(plan.train_hours)} for {plan.recipe.training.train_iters:,} steps, "
        f"{_shown(plan.capture_hours)} for capturing those tokens once",
    ]


def _shown(number: float) -> str:
    """One digit behind the point, of small numbers one that is not 0."""
    return f"{number:,.1f}" if number >= 0.1 else f"{number:.1g}"


def describe_suggestions(suggestions: Sequence[Suggestion]) -> str:
    """The fastest layouts that fit, with the line to type for the first."""
    if not suggestions:
        return "no layout fits on the node counts that were tried"
    nodes = suggestions[0].plan.recipe.cluster.nodes
    where = "1 node" if nodes == 1 else f"{nodes} nodes, none on fewer"
    lines = [f"{len(suggestions)} layouts fit on {where}; the fastest:"]
    for suggestion in suggestions[:SHOWN]:
        recipe = suggestion.plan.recipe
        words = layout_words(Layout.of(recipe), Recomputation.of(recipe))
        if recipe.loss.chunk_mib is not None:
            words += f", chunks of {recipe.loss.chunk_mib:g} MiB"
        lines.append(
            f"  {suggestion.plan.step.seconds:>7.2f} s  {suggestion.plan.memory.total / GIB:>6.1f} GiB  {words}"
        )
    first = " ".join(suggestions[0].overrides)
    lines += ["the first of them:", f"  {first}" if first else "  the recipe as it is"]
    return "\n".join(lines)
