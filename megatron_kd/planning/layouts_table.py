"""Which layouts of GPT-OSS 20B at 32,768 tokens fit one node, and what an online 120B teacher needs, as markdown."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_kd.config import Recipe
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.plan import Plan, plan_recipe
from megatron_kd.planning.published_recipes import gpt_oss
from megatron_kd.planning.published_results import PublishedRun
from megatron_kd.planning.recomputation import Recomputation
from megatron_kd.planning.suggest import candidates, overrides_between, suggest
from megatron_kd.planning.text import layout_words

EXPERT_SIZES = (1, 2, 4, 8)
LOSSES = ("fused", "dense")


def layouts_markdown() -> str:
    """A table for each loss, the fastest layouts, and the node counts of an online teacher."""
    parts = []
    for implementation in LOSSES:
        parts += _one_node(_recipe(implementation, "offline"))
    parts += ["### An online teacher of 120B", *map(_online, LOSSES)]
    return "\n\n".join(parts)


def _recipe(implementation: str, mode: str) -> Recipe:
    return gpt_oss(PublishedRun(implementation, mode, 8, 12.23, 345.7))


def _one_node(recipe: Recipe) -> list[str]:
    fitting = [
        plan
        for plan in map(plan_recipe, candidates(recipe, 1))
        if plan.memory.fits and plan.recipe.loss.chunk_mib is None
    ]
    flat = [plan for plan in fitting if Layout.of(plan.recipe).pp == 1]
    places = sorted({(Layout.of(plan.recipe).tp, Layout.of(plan.recipe).cp) for plan in flat})
    lines = [
        f"| {recipe.loss.implementation} | " + " | ".join(f"EP {size}" for size in EXPERT_SIZES) + " |",
        "|---" * (len(EXPERT_SIZES) + 1) + "|",
    ]
    for tp, cp in places:
        cells = [
            _cell(
                plan
                for plan in flat
                if (Layout.of(plan.recipe).tp, Layout.of(plan.recipe).cp, Layout.of(plan.recipe).ep) == (tp, cp, ep)
            )
            for ep in EXPERT_SIZES
        ]
        lines.append(f"| TP {tp}, CP {cp} | " + " | ".join(cells) + " |")
    best = min(fitting, key=lambda plan: plan.step.seconds, default=None)
    closing = f"No layout fits one node with the {recipe.loss.implementation} loss."
    if best is not None:
        closing = (
            f"Fastest with the {recipe.loss.implementation} loss, pipelines included: {_words(best)}: "
            f"{best.step.seconds:.2f} s a step, {best.step.tflops_per_gpu:.0f} TFLOP/s per GPU, "
            f"{best.memory.total / GIB:.1f} GiB. Behind the recipe: "
            f"`{' '.join(overrides_between(recipe, best.recipe))}`"
        )
    return [f"### One node of 8 × H200, offline, {recipe.loss.implementation} loss", "\n".join(lines), closing]


def _cell(plans: Iterable[Plan]) -> str:
    """The fastest way to fit; what it recomputes in brackets."""
    best = min(plans, key=lambda plan: plan.step.seconds, default=None)
    if best is None:
        return "–"
    granularity = Recomputation.of(best.recipe)
    again = {"full": " (all layers)", "selective": f" ({' '.join(granularity.modules)})"}
    words = again.get(granularity.granularity or "", "")
    return f"{best.step.seconds:.1f} s, {best.memory.total / GIB:.0f} GiB{words}"


def _words(plan: Plan) -> str:
    return layout_words(Layout.of(plan.recipe), Recomputation.of(plan.recipe))


def _online(implementation: str) -> str:
    found = suggest(_recipe(implementation, "online"))
    if not found:
        return f"- {implementation} loss: no layout fits on the node counts that were tried."
    best = found[0].plan
    nodes = best.recipe.cluster.nodes
    return (
        f"- {implementation} loss: {nodes} node{'' if nodes == 1 else 's'} at least; the fastest of {len(found)} "
        f"layouts there: {_words(best)}: {best.step.seconds:.1f} s a step, {best.memory.total / GIB:.1f} of "
        f"{best.memory.limit / GIB:.1f} GiB."
    )
