"""GPT-OSS on the road of the public commands, its layers over two stages and its experts over two ranks of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.assets import megatron_kd, steps_of, succeed, tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.training_runs import Layout, largest_difference
from tests.warm import start, warm

STEPS, MOVED = 6, 3
SPREAD = Layout(4, pp=2, ep=2).overrides()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    teacher, student = (tiny_gpt_oss_folder(folder / f"hf_{seed}", seed) for seed in (12, 13))
    path = tiny_recipe(
        folder,
        data={"train_tokens": 48 * 12, "heldout_tokens": 48 * 3},
        teacher={"model": teacher.model_dump(mode="json"), "capture": {"rows_per_shard": 4}},
        student={
            "from_teacher": None,
            "model": student.model_dump(mode="json"),
            "checkpoint": str(folder / "student"),
        },
        training={"train_iters": STEPS, "eval_interval": MOVED},
        checkpoint={"save_interval": MOVED},
        optimizer={"lr_warmup_iters": 0, "lr_decay_iters": STEPS},
    )
    for role in ("teacher", "student"):
        succeed(warm("convert", "import", path, "--role", role))
    succeed(warm("prepare", path))
    return path


def figures(ranks: list[Any]) -> Any:
    """What the first of several ranks prints; the others print nothing."""
    first, *others = ranks
    assert all(succeed(other).stdout == "" for other in others)
    return json.loads(succeed(first).stdout)


def test_the_road_in_stages_and_experts(recipe: Path) -> None:
    folder = recipe.parent
    captured = figures(start("capture", recipe, *SPREAD, "--json", ranks=4).wait())
    assert captured["complete"] and captured["rows_captured"] == 15

    alone, moved = (f"run_dir={folder / name}" for name in ("alone", "moved"))
    whole = json.loads(succeed(warm("train", recipe, alone, "--json")).stdout)
    assert (whole["iteration"], whole["finished"]) == (STEPS, True)

    half = megatron_kd("train", recipe, moved, *SPREAD, f"training.train_iters={MOVED}", "--json", ranks=4)
    assert json.loads(succeed(half).stdout)["iteration"] == MOVED, "printed once"
    assert half.stderr.count(f"{MOVED}/{MOVED} steps") == 1
    assert largest_difference(steps_of(folder / "alone")[:MOVED], steps_of(folder / "moved")) < 1e-4
    rest = json.loads(succeed(warm("train", recipe, moved, "--json")).stdout)
    assert (rest["resumed_from"], rest["iteration"], rest["finished"]) == (MOVED, STEPS, True)
    assert [step["iteration"] for step in steps_of(folder / "moved")] == list(range(1, STEPS + 1))
    assert largest_difference(steps_of(folder / "alone"), steps_of(folder / "moved")) < 1e-4

    evaluated = figures(start("evaluate", folder / "moved", *SPREAD, "--json", ranks=4).wait())
    for run in ("alone", "moved"):
        kept = json.loads((folder / run / f"evaluations/iter_{STEPS:07d}.json").read_text())
        figures_kept = {name: value for name, value in kept.items() if name.startswith("eval/")}
        assert {name: evaluated[name] for name in figures_kept} == pytest.approx(figures_kept, rel=1e-4)
