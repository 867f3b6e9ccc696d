"""Every recipe that is shipped: read, planned, and built on the meta device in its own layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_kd.config import Recipe, load_recipe
from megatron_kd.config.sweep import load_sweep
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.parameters import rank_parameters
from megatron_kd.planning.plan import plan_recipe
from megatron_kd.planning.suggest import candidates, overrides_between
from megatron_kd.sweep.inputs import inputs_of
from megatron_kd.testing import run_distributed
from tests.assets import ROOT

FLAGSHIPS = ("gptoss20b_32k", "gptoss120b_32k", "llama31_8b_to_3b_8k")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
SWEEPS = [name for name in FILES if "\nbase: " in (ROOT / name).read_text()]
RECIPES = [name for name in FILES if name not in SWEEPS]
PLANNED = [name for name in RECIPES if name.split("/")[1] in FLAGSHIPS]


def recipe(name: str) -> Recipe:
    return load_recipe(ROOT / name, [])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_read_and_says_how_far_it_was_tried(name: str) -> None:
    loaded = recipe(name)
    assert loaded.run_dir
    comment = (ROOT / name).read_text().split("\nextends")[0]
    assert "# Status: " in comment


def test_names_and_run_directories_are_distinct() -> None:
    loaded = [recipe(name) for name in RECIPES]
    assert len({each.name for each in loaded}) == len({each.run_dir for each in loaded}) == len(loaded)


def test_the_sweeps_are_the_ablations() -> None:
    names = ("loss_function", "packing", "tail", "temperature", "top_k")
    assert [f"recipes/ablations/{name}.yaml" for name in names] == SWEEPS


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_a_sweep_is_read_and_its_inputs_serve_all(name: str) -> None:
    assert "# Status: " in (ROOT / name).read_text().split("\nbase")[0]
    sweep = load_sweep(ROOT / name)
    assert len(sweep.points) > 2 and sweep.name == Path(name).stem
    served = [point for inputs in inputs_of(sweep) for point in inputs.points]
    assert sorted(served) == sorted(point.name for point in sweep.points)
    assert all(point.recipe.cluster.gpu == "cpu" and point.recipe.world_size == 1 for point in sweep.points)


def test_all_ablations_share_one_cache_where_they_share_rows() -> None:
    """Whichever is run first captures what the others read."""
    kept: dict[str, list[tuple[str, int, list[float]]]] = {}
    for name in SWEEPS:
        for inputs in inputs_of(load_sweep(ROOT / name)):
            teacher = inputs.recipe.teacher
            kept.setdefault(str(teacher.cache), []).append((name, teacher.top_k, teacher.temperatures))
    largest = load_recipe(ROOT / "recipes/ablations/smollm2.yaml").teacher
    for name, top_k, temperatures in kept[str(largest.cache)]:
        assert (top_k, temperatures) == (largest.top_k, largest.temperatures), name


@pytest.mark.parametrize("name", SWEEPS)
def test_an_ablation_can_be_asked_of_a_flagship(name: str) -> None:
    sweep = load_sweep(ROOT / name, base=ROOT / "recipes/gptoss20b_32k/offline_1node.yaml")
    assert all(plan_recipe(point.recipe).memory.fits for point in sweep.points)


@pytest.mark.parametrize("name", PLANNED)
def test_a_flagship_fits_its_gpus_by_the_plan(name: str) -> None:
    plan = plan_recipe(recipe(name)).to_dict()
    assert plan["memory"]["fits"], plan["memory"]


@pytest.mark.parametrize("name", PLANNED)
def test_no_layout_that_fits_is_faster_by_the_plan(name: str) -> None:
    """On the recipe's own nodes, within 1 %: layouts closer than that are chosen between by memory and simplicity."""
    loaded = recipe(name)
    fitting = [plan for plan in map(plan_recipe, candidates(loaded, loaded.cluster.nodes)) if plan.memory.fits]
    fastest = min(fitting, key=lambda plan: plan.step.seconds)
    assert plan_recipe(loaded).step.seconds <= 1.01 * fastest.step.seconds, overrides_between(loaded, fastest.recipe)


@pytest.mark.parametrize("folder", FLAGSHIPS)
def test_runs_of_one_comparison_lie_over_each_other(folder: str) -> None:
    """One project in wandb, and for each group equal models, rows, batches and loss."""
    runs = [recipe(name) for name in PLANNED if name.split("/")[1] == folder]
    views = [run.logging.wandb for run in runs]
    assert {view.project for view in views if view is not None} == {folder} and None not in views
    groups: dict[str | None, list[Recipe]] = {}
    for run, view in zip(runs, views, strict=True):
        groups.setdefault(view.group if view else None, []).append(run)
    for group in groups.values():
        assert len(group) > 1
        first = group[0]
        for run in group:
            assert run.data == first.data and run.student == first.student and run.optimizer == first.optimizer
            assert run.teacher.model == first.teacher.model and run.seed == first.seed
            assert run.training.global_batch_size == first.training.global_batch_size
            assert run.training.train_iters == first.training.train_iters
            assert run.loss.divergence == first.loss.divergence and run.loss.temperature == first.loss.temperature


def built_parameters(rank: int, world: int, names: list[str]) -> dict[str, list[tuple[str, int, int]]]:
    """For each recipe (model, pipeline stage, parameters) as Megatron-Core builds one rank of each stage.

    The process groups have the recipe's size and no other members: nothing is exchanged to build a model.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_kd.device import select_device
    from megatron_kd.models.build import build_on_meta
    from megatron_kd.models.parallel import init_model_parallel

    select_device("cpu")
    dist.destroy_process_group()
    counted = {}
    known: dict[tuple[str, str, int], int] = {}  # many recipes share models and layouts
    for name in names:
        loaded = recipe(name)
        layout, stages = loaded.parallelism, loaded.parallelism.pipeline_model_parallel_size
        found = []
        for stage in range(stages):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=stage * loaded.world_size // stages, world_size=loaded.world_size
            )
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor_model_parallel_size,
                pipeline_model_parallel_size=stages,
                context_parallel_size=layout.context_parallel_size,
                expert_model_parallel_size=layout.expert_model_parallel_size,
                expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
            groups = init_model_parallel(layout, seed=1)
            assert groups.pp_rank == stage
            for role, model in (("student", loaded.student.model), ("teacher", loaded.teacher.model)):
                key = model.model_dump_json(), f"{layout} of {loaded.world_size}", stage
                if key not in known:
                    built = build_on_meta(model, groups, layout)
                    known[key] = sum(parameter.numel() for parameter in built.parameters())
                found.append((role, stage, known[key]))
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        counted[name] = found
    return counted


def test_every_flagship_is_built_with_the_planned_parameters_on_each_rank() -> None:
    (counted,) = run_distributed(built_parameters, 1, PLANNED)
    assert list(counted) == PLANNED
    for name, found in counted.items():
        loaded = recipe(name)
        layout = Layout.of(loaded)
        for role, stage, parameters in found:
            model = loaded.student.model if role == "student" else loaded.teacher.model
            assert parameters == rank_parameters(model, layout, stage).total, (name, role, stage)


def test_comments_name_files_that_are_there() -> None:
    for name in FILES:
        for word in (ROOT / name).read_text().split():
            if word.startswith(("launch/", "recipes/")) and word.endswith((".sh", ".yaml")):
                assert (ROOT / word).is_file(), f"{name}: {word}"
