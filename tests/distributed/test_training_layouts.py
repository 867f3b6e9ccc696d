"""One training run gives one curve, however its model and its batches are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_kd.data.samples import open_samples
from megatron_kd.testing import run_distributed
from tests.assets import ROOT, tiny_llama_folder, tiny_recipe
from tests.training_runs import Layout, curve_of, largest_difference, make_inputs, recipe_in

STEPS = 20
TOLERANCE = 1e-4
ALONE = Layout(1)
OTHERS = [
    Layout(1, micro=2),
    Layout(2, tp=2, sp=True),
    Layout(2, tp=2),
    Layout(2),
    Layout(4, tp=2, sp=True, micro=2),
    Layout(2, pp=2),
    Layout(4, tp=2, sp=True, pp=2, micro=2),
    Layout(2, cp=2, micro=2),
    Layout(4, cp=2),
    Layout(4, tp=2, sp=True, cp=2),
    Layout(4, pp=2, cp=2),
]
KINDS = ("untied", "tied")
Curve = list[dict[str, float]]


def _recipe(folder: Path, kind: str) -> Path:
    model = yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text())
    model |= {"untie_embeddings_and_output_weights": kind == "untied", "hf": str(tiny_llama_folder(kind == "untied"))}
    return tiny_recipe(folder / kind, teacher={"model": model})


def _rank(rank: int, world: int, recipes: dict[str, Path]) -> dict[tuple[str, Layout], Curve]:
    curves = {}
    for kind, recipe in recipes.items():
        if world == 1:
            make_inputs(recipe_in(recipe, ALONE))
        for layout in (ALONE, *OTHERS):
            if layout.world == world:
                curves[kind, layout] = curve_of(recipe_in(recipe, layout), STEPS)
    return curves


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    return {kind: _recipe(folder, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def curves(recipes: dict[str, Path]) -> dict[tuple[str, Layout], list[Curve]]:
    """What each rank reports, by kind and layout."""
    found: dict[tuple[str, Layout], list[Curve]] = {}
    for world in (1, 2, 4):
        ranks: list[dict[tuple[str, Layout], Curve]] = run_distributed(_rank, world, recipes)
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


def test_rows_have_unequal_numbers_of_unmasked_tokens(curves: Any, recipes: dict[str, Path]) -> None:
    recipe = recipe_in(recipes["untied"], ALONE)
    samples = open_samples(recipe.data.samples)
    counts = [int(samples.loss_mask(i).sum()) for i in samples.split("train")]
    assert min(counts) < 8 and max(counts) > recipe.data.seq_length - 8 and len(set(counts)) > 20
    # Equal rows would hide a mean of means; the steps do differ in what they train on.
    assert len({step["tokens"] for step in curves["untied", ALONE][0]}) > STEPS // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_curve_does_not_depend_on_the_layout(curves: dict[Any, list[Curve]], kind: str, layout: Layout) -> None:
    alone = curves[kind, ALONE][0]
    assert alone[-1]["loss/kd"] < 0.9 * alone[0]["loss/kd"], "a student that learns nothing shows nothing"
    for curve in curves[kind, layout]:
        assert [step["tokens"] for step in curve] == [step["tokens"] for step in alone]
        assert largest_difference(alone, curve) < TOLERANCE
