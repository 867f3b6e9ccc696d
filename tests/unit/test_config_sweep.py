"""A sweep's points: their names, their recipes, and everything that is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_kd.config import load_recipe
from megatron_kd.config.sweep import Sweep, load_sweep
from megatron_kd.errors import ConfigError
from tests.assets import ROOT

BASE = ROOT / "recipes/smollm2_cpu.yaml"


def write(folder: Path, **file: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": str(BASE), **file}, sort_keys=False))
    return path


def values(sweep: Sweep, key: str) -> list[Any]:
    section, name = key.split(".")
    return [getattr(getattr(point.recipe, section), name) for point in sweep.points]


def test_a_grid_is_every_combination_and_runs_come_behind(tmp_path: Path) -> None:
    grid = {"loss.divergence": ["forward_kl", "jsd"], "optimizer.lr": [1e-3, 2.0e-4]}
    sweep = load_sweep(write(tmp_path, grid=grid, runs={"ce_only": {"loss": {"ce_weight": 1.0}}, "base": {}}))
    assert [point.name for point in sweep.points] == [
        "divergence_forward_kl-lr_0.001",
        "divergence_forward_kl-lr_0.0002",
        "divergence_jsd-lr_0.001",
        "divergence_jsd-lr_0.0002",
        "ce_only",
        "base",
    ]
    assert values(sweep, "loss.divergence") == ["forward_kl"] * 2 + ["jsd"] * 2 + ["forward_kl"] * 2
    assert values(sweep, "optimizer.lr") == [1e-3, 2e-4] * 2 + [1e-3] * 2
    assert values(sweep, "loss.ce_weight") == [0.0] * 4 + [1.0, 0.0]
    assert sweep.keys == ["loss.divergence", "optimizer.lr", "loss.ce_weight"]
    for point in sweep.points:
        assert point.recipe.name == f"mine_{point.name}" and point.recipe.run_dir == f"runs/mine/{point.name}"
        wandb = point.recipe.logging.wandb
        assert wandb is not None and (wandb.project, wandb.group) == ("smollm2_cpu", "mine")
    plain = load_recipe(BASE)
    last = sweep.points[-1].recipe
    assert last.model_copy(update={"name": plain.name, "run_dir": plain.run_dir, "logging": plain.logging}) == plain


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        ({"loss.temperature": [1.0, 2, 0.5]}, ["temperature_1", "temperature_2", "temperature_0.5"]),
        ({"data.shuffle": [True, False]}, ["shuffle_true", "shuffle_false"]),
        ({"training.threads": [None, 2]}, ["threads_null", "threads_2"]),
        ({"data.samples": ["/a/b", "runs/c d"]}, ["samples_a-b", "samples_runs-c-d"]),
        ({"teacher.temperatures": [[1.0], [1.0, 2.0]]}, ["temperatures_1.0", "temperatures_1.0-2.0"]),
        (
            {"teacher.checkpoint": ["a"], "teacher.cache": ["x"], "checkpoint.keep": [1]},
            ["checkpoint_a-cache_x-keep_1"],
        ),
        ({"teacher.model.norm_epsilon": [1]}, None),
    ],
)
def test_names_are_readable_and_fit_a_file_system(
    tmp_path: Path, axis: dict[str, list[Any]], names: list[str] | None
) -> None:
    path = write(tmp_path, grid=axis)
    if names is None:
        with pytest.raises(ConfigError, match=r"a recipe has no key teacher.model.norm_epsilon: did you mean teacher"):
            load_sweep(path)
    else:
        assert [point.name for point in load_sweep(path).points] == names


def test_two_keys_that_end_alike_keep_their_sections(tmp_path: Path) -> None:
    keys = {"teacher.checkpoint": ["a"], "student.checkpoint": [None]}
    (point,) = load_sweep(write(tmp_path, grid=keys)).points
    assert point.name == "teacher.checkpoint_a-student.checkpoint_null"


def test_the_cache_of_several_temperatures_has_them_all(tmp_path: Path) -> None:
    axis = {"loss.temperature": [4.0, 1.0, 2.0]}
    assert values(load_sweep(write(tmp_path, grid=axis)), "teacher.temperatures") == [[1.0, 2.0, 4.0]] * 3
    sweep = load_sweep(write(tmp_path, grid=axis), ["teacher.temperatures=[4.0, 2.0, 1.0]"])
    assert values(sweep, "teacher.temperatures") == [[4.0, 2.0, 1.0]] * 3
    # A point's own word counts, even where it makes the point impossible.
    fixed = {"hot": {"loss.temperature": 3.0, "teacher.temperatures": [1.0]}}
    with pytest.raises(ConfigError, match=r"hot: .*loss.temperature 3.0 is not among"):
        load_sweep(write(tmp_path, runs=fixed))


def test_overrides_and_another_base(tmp_path: Path) -> None:
    path = write(tmp_path, grid={"loss.divergence": ["tvd"]}, run_dir=str(tmp_path / "out"))
    (point,) = load_sweep(path, ["training.train_iters=70"]).points
    assert point.recipe.training.train_iters == 70
    assert point.recipe.run_dir == f"{tmp_path}/out/divergence_tvd"
    flagship = load_sweep(
        write(tmp_path, grid={"loss.divergence": ["tvd"]}), base=ROOT / "recipes/gptoss20b_32k/offline_1node.yaml"
    )
    assert flagship.name == "gptoss20b_32k_offline_1node_mine"
    assert flagship.points[0].recipe.teacher.model.name == "gpt_oss_120b"
    assert flagship.points[0].recipe.run_dir == "runs/gptoss20b_32k_offline_1node_mine/divergence_tvd"


def test_everything_that_is_wrong_with_the_points_is_said_at_once(tmp_path: Path) -> None:
    grid = {"loss.tail": ["bucket", "truncate", "renormalise"], "loss.divergence": ["reverse_kl"]}
    path = write(tmp_path, grid=grid, runs={"same": {"loss.ce_weight": 2.0}, "twin": {"loss.ce_weight": 2.0}})
    with pytest.raises(ConfigError) as failed:
        load_sweep(path)
    text = str(failed.value)
    assert text.startswith(f"{path}: 4 of 5 points cannot run: ") and "\n" not in text
    assert "tail_truncate-divergence_reverse_kl: " in text and "not defined for divergence 'reverse_kl'" in text
    assert "loss.tail is 'renormalise', must be" in text and "tail_bucket" not in text
    assert text.count("loss.ce_weight is 2.0") == 1 and "same, twin: " in text


@pytest.mark.parametrize(
    ("file", "overrides", "says"),
    [
        ({}, [], "has no points: give it a grid of keys and values, or runs by name"),
        ({"gird": {"a.b": [1]}}, [], "unknown key gird: did you mean grid?"),
        ({"grid": {"loss.divergnce": ["jsd"]}}, [], "has no key loss.divergnce: did you mean loss.divergence?"),
        ({"runs": {"a": {"seeds": 1}}}, [], "runs.a.seeds: a recipe has no key seeds: did you mean seed?"),
        ({"runs": {"a": {"name": "b"}}}, [], "runs.a.name: the sweep sets name itself: remove it"),
        ({"runs": {"a/b": {}}}, [], "'a/b' is no name"),
        ({"grid": {"loss.divergence": []}}, [], "grid.loss.divergence"),
        ({"grid": {"loss.beta": [0.5, 0.50]}}, [], "grid has the point beta_0.5 twice"),
        ({"grid": {"seed": [1]}, "runs": {"seed_1": {}}}, [], "runs.seed_1 has the name of a point of grid"),
        ({"grid": {"seed": list(range(40)), "training.train_iters": list(range(40))}}, [], "more than 1000 points"),
        ({"grid": {"seed": [1]}}, ["seed=2"], "seed is what the sweep varies"),
        ({"grid": {"seed": [1]}}, ["run_dir=x"], "the sweep sets run_dir itself"),
        ({"grid": {"seed": [1]}}, ["sed=1"], "did you mean seed?"),
        ({"grid": {"seed": [1]}, "base": "gone.yaml"}, [], "gone.yaml: no such file"),
        ({"extends": "x.yaml"}, [], "is a recipe: a sweep is a file of its own, base: mine.yaml with grid or runs"),
    ],
)
def test_what_is_wrong_with_the_file(tmp_path: Path, file: dict[str, Any], overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as failed:
        load_sweep(write(tmp_path, **file), overrides)
    assert says in str(failed.value) and "\n" not in str(failed.value)


def test_a_sweep_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.yaml is a sweep: run it with megatron-kd sweep"):
        load_recipe(write(tmp_path, grid={"seed": [1]}))
