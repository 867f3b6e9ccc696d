"""Plans of an online teacher in its own layout and with its weights in the host's memory."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_kd.config import Recipe
from megatron_kd.config.gpus import GPUS
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.planning.advice import remedies
from megatron_kd.planning.efficiency import GIB, HOST_LINK
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.memory import Memory, moments, plan_memory
from megatron_kd.planning.parameters import rank_parameters
from megatron_kd.planning.plan import plan_recipe
from megatron_kd.planning.step_time import plan_step
from megatron_kd.planning.suggest import candidates
from megatron_kd.planning.teacher import teacher_layout, teacher_memory
from megatron_kd.planning.text import describe
from tests.unit.test_planning import recipe_of

ROW_HIDDEN = 32768 * 2880 * 2  # bytes of one row's hidden states


def online(own: dict[str, Any] | None = None, *, offload: bool = False, targets: str = "full", **more: Any) -> Recipe:
    """GPT-OSS 120B teaching 20B at TP 8 + SP, EP 8."""
    teacher = {"mode": "online", "cache": None, "checkpoint": "teacher", "targets": targets, "offload": offload}
    return recipe_of(teacher={**teacher, "parallelism": own}, **more)


def at(recipe: Recipe, moment: str) -> Memory:
    return next(each for each in moments(recipe) if each.moment == moment)


OWN = {"expert_model_parallel_size": 8}


def test_in_the_students_layout_nothing_changes() -> None:
    same = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "expert_model_parallel_size": 8}
    for targets in ("full", "top_k"):
        assert plan_memory(online(same, targets=targets)) == plan_memory(online(targets=targets))
        assert plan_step(online(same, targets=targets)) == plan_step(online(targets=targets))


def test_the_weights_are_those_of_the_teachers_own_ranks() -> None:
    recipe = online(OWN, targets="top_k")
    layout = teacher_layout(recipe)
    assert (layout.tp, layout.ep, layout.dp, layout.microbatches) == (1, 8, 8, 4)
    weights = rank_parameters(recipe.teacher.model, layout, 0).total * 2
    taught = teacher_memory(recipe, Layout.of(recipe), 0)
    assert (taught.kept, taught.host) == (weights, 0)
    # All 32 micro batches' answers: ids, log-probabilities and tail.
    assert taught.held == 32 * 32768 * (8 * 100 + 4)


def test_the_head_lies_in_the_students_split() -> None:
    recipe = online(OWN)
    model, layout = recipe.teacher.model, teacher_layout(recipe)
    without = rank_parameters(model, layout, 0).total - padded_vocab_size(model.vocab_size, 1) * 2880
    head = padded_vocab_size(model.vocab_size, 8) // 8 * 2880
    taught = teacher_memory(recipe, Layout.of(recipe), 0)
    assert taught.kept == 2 * (without + head)
    assert taught.held == 32 * ROW_HIDDEN / 8, "the slices of all rows"


@pytest.mark.parametrize("targets", ["full", "top_k"])
@pytest.mark.parametrize("own", [None, OWN])
def test_offloaded_weights_are_on_the_host_but_for_the_head(own: dict[str, Any] | None, targets: str) -> None:
    there, gone = online(own, targets=targets), online(own, targets=targets, offload=True)
    resident, moved = (teacher_memory(recipe, Layout.of(recipe), 0) for recipe in (there, gone))
    assert moved.kept + moved.host == resident.kept and resident.host == 0
    head = padded_vocab_size(there.teacher.model.vocab_size, 8) // 8 * 2880 * 2
    assert moved.kept == (head if targets == "full" else 0)
    assert at(gone, "backward").total < at(there, "backward").total - 20 * GIB
    plan = plan_recipe(gone)
    assert plan.to_dict()["memory"]["host"]["teacher_gib"] == pytest.approx(moved.host / GIB)
    assert "the teacher's weights, pinned" in describe(plan)


def test_stages_meet_the_stages_on_their_ranks() -> None:
    pipeline = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}
    recipe = online(pipeline, targets="top_k", parallelism={"pipeline_model_parallel_size": 2, **_HALF})
    layout = teacher_layout(recipe)
    stages = [rank_parameters(recipe.teacher.model, layout, stage).total * 2 for stage in range(4)]
    assert stages[0] > stages[1] == stages[2]
    first, last = (teacher_memory(recipe, Layout.of(recipe), stage) for stage in range(2))
    assert (first.kept, last.kept) == (max(stages[:2]), max(stages[2:]))
    assert first.held == 0 < last.held


_HALF = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}


def test_the_copy_is_hidden_as_far_as_the_pass_is_long() -> None:
    recipe = online(offload=True)
    moved = teacher_memory(recipe, Layout.of(recipe), 0).host
    copy = moved / (HOST_LINK * GPUS["h200"].host_bandwidth)
    parts = plan_step(recipe).parts
    assert parts["teacher"] > copy, "32 rows take longer than the weights"
    assert parts["teacher_transfer"] == pytest.approx(copy / 36)
    small = online(offload=True, training={"global_batch_size": 1})
    parts = plan_step(small).parts
    assert parts["teacher"] < copy
    assert parts["teacher_transfer"] == pytest.approx(copy - parts["teacher"])


def test_answers_take_the_time_of_their_way() -> None:
    shared, own = plan_step(online()), plan_step(online(OWN))
    assert shared.parts["teacher_transfer"] == 0 < own.parts["teacher_transfer"]
    far = plan_step(online(OWN, cluster={"nodes": 4}, training={"global_batch_size": 128}))
    assert far.parts["teacher_transfer"] > 3 * own.parts["teacher_transfer"], "over the network"


def test_a_plan_that_does_not_fit_is_told_of_it() -> None:
    recipe = online(cluster={"gpu": "h100"})
    words = dict(remedies(recipe))
    assert not plan_memory(recipe).fits
    assert words["teacher.offload=true"].memory.total < plan_memory(recipe).total


def test_a_search_keeps_the_teachers_layout() -> None:
    recipe = online(OWN)
    found = list(candidates(recipe, 1))
    assert found and all(each.teacher.parallelism == recipe.teacher.parallelism for each in found)
    assert not list(candidates(online({"expert_model_parallel_size": 16}, cluster={"nodes": 2}), 1))
    assert "the teacher in its own layout: TP 1, EP 8, DP 8" in describe(plan_recipe(recipe))


def test_every_gpu_has_a_link_to_its_host() -> None:
    for gpu in GPUS.values():
        assert gpu.host_bandwidth < gpu.link_bandwidth
