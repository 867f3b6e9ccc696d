"""What the points of a sweep share is made once, by a recipe that serves all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_kd.config.sweep import Sweep, load_sweep
from megatron_kd.errors import ConfigError
from megatron_kd.sweep.inputs import inputs_of
from tests.assets import ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory: nothing of what the recipes read is there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep_of(place: Path, *overrides: str, **file: Any) -> Sweep:
    path = place / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": str(ROOT / "recipes/smollm2_cpu.yaml"), **file}, sort_keys=False))
    return load_sweep(path, overrides)


def test_one_cache_has_the_largest_k_and_every_temperature(place: Path) -> None:
    grid = {"teacher.top_k": [5, 100, 20], "loss.temperature": [2.0, 1.0], "data.train_tokens": [1200, 4800]}
    (inputs,) = inputs_of(sweep_of(place, grid=grid))
    teacher = inputs.recipe.teacher
    assert (teacher.top_k, teacher.temperatures, inputs.recipe.data.train_tokens) == (100, [1.0, 2.0], 4800)
    assert len(inputs.points) == 12 and inputs.name == "_inputs_1"
    assert list(inputs.missing()) == [["convert", "import"], ["prepare"], ["capture"]]
    assert inputs.for_capture() == inputs.recipe


def test_what_is_there_is_not_made_again(place: Path) -> None:
    (inputs,) = inputs_of(sweep_of(place, grid={"seed": [1, 2]}))
    commands = inputs.missing()
    assert next(commands) == ["convert", "import"]
    samples = place / inputs.recipe.data.samples
    samples.mkdir(parents=True)
    (samples / "samples.json").write_text("{}")
    assert list(commands) == [["capture"]], "looked at when the command before is done"


def test_an_online_teacher_is_imported_and_nothing_captured(place: Path) -> None:
    runs = {"online": {"teacher.mode": "online"}}
    (inputs,) = inputs_of(sweep_of(place, runs=runs))
    assert list(inputs.missing()) == [["convert", "import"], ["prepare"]]
    (both,) = inputs_of(sweep_of(place, runs={**runs, "offline": {}}))
    assert both.captures and both.recipe.teacher.mode == "offline" and list(both.missing())[-1] == ["capture"]


def test_a_student_with_weights_of_its_own_is_imported(place: Path) -> None:
    changes = ["student.from_teacher=null", "student.checkpoint=runs/student", "student.model=smollm2_135m"]
    (inputs,) = inputs_of(sweep_of(place, *changes, runs={"one": {}}))
    assert list(inputs.missing())[1] == ["convert", "import", "--role=student"]
    (place / "runs/student").mkdir(parents=True)
    assert ["convert", "import", "--role=student"] not in inputs.missing()


def test_each_packing_has_inputs_of_its_own(place: Path) -> None:
    sweep = load_sweep(ROOT / "recipes/ablations/packing.yaml")
    assert [each.points for each in inputs_of(sweep)] == [["concatenate"], ["documents"], ["padded"]]
    assert [each.recipe.data.packing for each in inputs_of(sweep)] == ["concatenate", "documents", "padded"]


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (
            {"a": {}, "b": {"data.packing": "documents"}},
            "the points a and b share data.samples runs/demo/samples, but differ in data.packing: "
            "give each its own data.samples",
        ),
        ({"a": {}, "b": {"data.samples": "other"}}, "share teacher.cache runs/demo/cache, but differ in data.samples"),
        ({"a": {}, "b": {"teacher.engine": "hf"}}, "but differ in teacher.engine: give each its own teacher.cache"),
    ],
)
def test_one_folder_is_not_filled_in_two_ways(place: Path, runs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        inputs_of(sweep_of(place, runs=runs))
