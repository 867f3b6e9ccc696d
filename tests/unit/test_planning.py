"""The arithmetic of plans: against published counts, the FLOP formula, memory facts, and the recipe's own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.config import Recipe, load_model, load_recipe
from megatron_kd.models.flops import forward_flops_per_token
from megatron_kd.planning.advice import remedies
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.memory import model_weights, moments, plan_memory
from megatron_kd.planning.parameters import rank_parameters, whole_model
from megatron_kd.planning.plan import plan_recipe
from megatron_kd.planning.step_time import plan_step
from megatron_kd.planning.suggest import candidates, suggest
from megatron_kd.planning.text import describe, describe_suggestions
from megatron_kd.planning.work import layer_work, projection_flops
from tests.assets import ROOT, environment
from tests.unit.test_models_shelf import COUNTS


def recipe_of(**sections: Any) -> Recipe:
    """GPT-OSS 20B from the 120B cache at 32K on one node, with changes."""
    values: dict[str, Any] = {
        "name": "planned",
        "cluster": {"gpus_per_node": 8, "gpu": "h200"},
        "data": {"samples": "samples", "seq_length": 32768},
        "teacher": {"mode": "offline", "model": load_model("gpt_oss_120b", ROOT).model_dump(), "cache": "cache"},
        "student": {"model": load_model("gpt_oss_20b", ROOT).model_dump()},
        "parallelism": {
            "tensor_model_parallel_size": 8,
            "expert_model_parallel_size": 8,
            "sequence_parallel": True,
        },
        "training": {"global_batch_size": 32, "train_iters": 100},
        "optimizer": {"lr": 1e-5},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


ONE = {"tensor_model_parallel_size": 1, "sequence_parallel": False}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_the_models(name: str) -> None:
    # test_models_shelf.py holds the same numbers against models on the meta device.
    assert whole_model(load_model(name, ROOT)) == COUNTS[name][0]


@pytest.mark.parametrize("ep", [1, 8])
@pytest.mark.parametrize(("tp", "pp", "cp"), [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_work_of_all_ranks_is_the_models(tp: int, pp: int, cp: int, ep: int) -> None:
    """All ranks together do what the public formula counts, whatever the layout."""
    recipe = recipe_of(
        parallelism={
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep if pp * ep <= 8 else 1,
        }
    )
    layout, model = Layout.of(recipe), recipe.student.model
    layers = sum(layer_work(model, layout, window).total for window in model.layer_windows())
    ranks = layout.tp * layout.cp
    together = ranks * (layers + projection_flops(model, layout))
    assert together == pytest.approx(32768 * forward_flops_per_token(model, 32768), rel=1e-3)


@pytest.mark.parametrize(("nodes", "gigabytes"), [(1, 56), (4, 33)])
def test_static_memory_of_the_student(nodes: int, gigabytes: float) -> None:
    recipe = recipe_of(cluster={"nodes": nodes}, parallelism={**ONE, "expert_model_parallel_size": 8})
    parts = plan_memory(recipe).parts
    largest = rank_parameters(recipe.student.model, Layout.of(recipe), 0).largest * 2
    static = parts["weights"] + parts["gradients"] + parts["optimizer"] - largest
    assert static / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_an_offloaded_optimizer_lies_on_the_host() -> None:
    """Of each offloaded bf16 parameter 12 bytes leave the GPU; on the host its gradient comes to them."""
    layout: dict[str, Any] = {"parallelism": {**ONE, "expert_model_parallel_size": 8}}
    plain = plan_memory(recipe_of(**layout))
    moved = plan_memory(
        recipe_of(**layout, optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75})
    )
    assert moved.parts == {**plain.parts, "optimizer": pytest.approx(plain.parts["optimizer"] / 4)}
    assert moved.host_optimizer == pytest.approx(0.75 * plain.parts["optimizer"] / 12 * 16)
    assert plain.host_optimizer == 0.0


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt_oss_20b", 8), ("gpt_oss_120b", 33)])
def test_weights_of_a_frozen_teacher(name: str, gigabytes: float) -> None:
    recipe = recipe_of(parallelism={**ONE, "expert_model_parallel_size": 8})
    assert model_weights(load_model(name, ROOT), Layout.of(recipe)) / 1e9 == pytest.approx(gigabytes, rel=0.06)


def test_each_means_lowers_its_part() -> None:
    def parts(**sections: Any) -> dict[str, float]:
        return plan_memory(recipe_of(**sections)).parts

    plain = parts()
    full = parts(training={"recompute_granularity": "full"})
    half = parts(training={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 12})
    some = parts(training={"recompute_granularity": "selective", "recompute_modules": ["moe_act"]})
    assert full["activations"] < half["activations"] < plain["activations"]
    assert full["activations"] < some["activations"] < plain["activations"]
    assert full["weights"] == plain["weights"]

    def loss(implementation: str) -> float:
        found = [m for m in moments(recipe_of(loss={"implementation": implementation})) if m.moment == "loss"]
        return found[0].parts["loss_workspace"]

    assert loss("fused") < loss("forward_chunked") < loss("dense")
    online = parts(teacher={"mode": "online", "cache": None, "checkpoint": "teacher", "targets": None})
    assert online["teacher"] > 25 * GIB and plain["teacher"] == 0


def test_a_pipeline_holds_more_on_its_first_stage() -> None:
    stages = {"pipeline_model_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 1}
    recipe = recipe_of(parallelism={**ONE, **stages})
    backward = {m.stage: m for m in moments(recipe) if m.moment == "backward"}
    kept = [backward[stage].parts["activations"] for stage in range(4)]
    # 4, 3, 2 and 1 micro batches in flight.
    assert kept == sorted(kept, reverse=True) and kept[0] > 2.5 * kept[3]
    step = plan_step(recipe)
    alone = plan_step(recipe_of(parallelism={**ONE, "context_parallel_size": 2}))
    assert step.parts["pipeline_bubble"] > 0 == alone.parts["pipeline_bubble"]


def test_interleaved_stages_wait_less_and_hold_more() -> None:
    def of(chunks: int | None) -> tuple[Layout, dict[str, float], list[float]]:
        stages = {"pipeline_model_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 1}
        interleaved = {"virtual_pipeline_model_parallel_size": chunks}
        recipe = recipe_of(parallelism={**ONE, **stages, **interleaved})
        backward = [m.parts["activations"] for m in moments(recipe) if m.moment == "backward"]
        return Layout.of(recipe), plan_step(recipe).parts, backward

    layout, parts, held = of(None)
    chunked, shorter, more = of(3)
    # The bubble is (p − 1) / v micro batches (arXiv:2104.04473, section 2.2.2); everything else but messages stays.
    assert shorter["pipeline_bubble"] == pytest.approx(parts["pipeline_bubble"] / 3)
    assert shorter["forward"] == pytest.approx(parts["forward"]) and shorter["communication"] > parts["communication"]
    # In units of chunks, a third of a stage: 2·3 + 2·4 + 1 on the first, 2·4 + 1 on the last.
    assert [chunked.in_flight(stage) for stage in (0, 3)] == [15, 9]
    assert more[0] == pytest.approx(held[0] * 15 / 3 / 4, rel=0.1) and more[3] > 2 * held[3]
    layers = [chunked.layers_of(stage, 24) for stage in range(4)]
    assert layers[1] == [2, 3, 10, 11, 18, 19] and sorted(np.ravel(layers)) == list(range(24))
    assert layout.layers_of(1, 24) == [6, 7, 8, 9, 10, 11]


def test_recomputation_costs_a_forward_pass() -> None:
    plain = plan_step(recipe_of()).parts
    full = plan_step(recipe_of(training={"recompute_granularity": "full"})).parts
    assert plain["recomputation"] == 0
    assert full["recomputation"] == pytest.approx(full["forward"] + full["communication"] / 2.2, rel=0.1)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"teacher": {"mode": "online", "cache": None, "checkpoint": "teacher", "targets": None}},
        {"loss": {"implementation": "dense"}, "cluster": {"gpu": "h100"}},
    ],
    ids=["offline", "online", "dense on h100"],
)
def test_suggestions_fit_and_can_be_typed(sections: Any, tmp_path: Path) -> None:
    from megatron_kd.config import dump_recipe

    recipe = recipe_of(**sections)
    found = suggest(recipe)
    assert found and all(s.plan.memory.fits for s in found)
    seconds = [round(s.plan.step.seconds, 3) for s in found]
    assert seconds == sorted(seconds)
    nodes = found[0].plan.recipe.cluster.nodes
    fewer = [n for n in (1, 2, 4, 8) if n < nodes]
    assert not any(plan_recipe(other).memory.fits for n in fewer for other in candidates(recipe, n))
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    for suggestion in (*found[:3], found[-1]):
        typed = load_recipe(path, suggestion.overrides)
        assert plan_recipe(typed).to_dict() == suggestion.plan.to_dict()
    assert " ".join(found[0].overrides) in describe_suggestions(found)


def test_a_recipe_that_does_not_fit_says_what_would() -> None:
    plan = plan_recipe(
        recipe_of(loss={"implementation": "dense"}, parallelism=ONE, training={"recompute_granularity": "full"})
    )
    text = describe(plan)
    over = (plan.memory.total - plan.memory.limit) / GIB
    assert f"does NOT fit, {over:.1f} too much" in text
    assert "largest part: loss workspace" in text and "with loss.implementation=fused" in text


def test_what_would_help_can_be_typed(tmp_path: Path) -> None:
    from megatron_kd.config import dump_recipe

    recipe = recipe_of(
        loss={"implementation": "dense"},
        teacher={"mode": "online", "cache": None, "checkpoint": "teacher", "targets": None},
        training={"micro_batch_size": 2},
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    found = dict(remedies(recipe))
    helped = {words.split("=")[0] for words in found}
    assert {"teacher.mode", "training.micro_batch_size", "loss.implementation"} < helped
    for words, plan in found.items():
        assert plan_recipe(load_recipe(path, words.split())).to_dict() == plan.to_dict(), words


@pytest.mark.parametrize(
    ("recipe", "memory_gib", "seconds"), [("smollm2_cpu", 2.15, 1.35), ("smollm2_cpu_online", 2.70, 2.02)]
)
def test_the_demo_is_predicted_as_measured(recipe: str, memory_gib: float, seconds: float) -> None:
    # Measured: docs/measurements.md, "The demo".
    plan = plan_recipe(load_recipe(ROOT / f"recipes/{recipe}.yaml"))
    assert plan.memory.total / GIB == pytest.approx(memory_gib, rel=0.15)
    assert plan.step.seconds == pytest.approx(seconds, rel=0.35)


def test_a_plan_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_kd.cli import app\n"
        "app(['plan', 'recipes/smollm2_cpu.yaml', '--suggest'], standalone_mode=False)\n"
        "app(['plan', '--published'], standalone_mode=False)\n"
        "heavy = {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "memory of the fullest rank" in done.stdout
