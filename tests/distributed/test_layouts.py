"""One training run gives one curve, one model and one evaluation, however model and batches are spread over ranks.

The figures go to docs/measurements.md by ``python -m tests.layouts_table``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_kd.config import ModelConfig
from megatron_kd.data.samples import open_samples
from megatron_kd.testing import run_distributed
from tests import layouts_table
from tests.assets import ROOT, tiny_llama_folder, tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.training_runs import Layout, Trainer, largest_difference, make_inputs, recipe_in

STEPS, TOLERANCE = 3, 1e-4
ALONE = Layout(1)
KINDS = {
    "tiny_llama": [
        Layout(1, micro=2),
        Layout(2),
        Layout(2, tp=2),
        Layout(2, tp=2, sp=True),
        Layout(2, pp=2),
        Layout(2, pp=2, vp=2),
        Layout(2, cp=2, micro=2),
        Layout(4, tp=2, sp=True, micro=2),
        Layout(4, pp=2),
        Layout(4, pp=2, vp=2),
        Layout(4, cp=2),
        Layout(4, tp=2, sp=True, pp=2, micro=2),
        Layout(4, tp=2, sp=True, pp=2, vp=2),
        Layout(4, tp=2, sp=True, cp=2),
        Layout(4, pp=2, cp=2),
        Layout(4, pp=2, vp=2, cp=2),
    ],
    # Two stages then hold the embedding, and tensor-parallel ranks a part of both.
    "tiny_llama, tied": [
        Layout(2, tp=2, sp=True),
        Layout(2, pp=2),
        Layout(2, pp=2, vp=2),
        Layout(4, tp=2, sp=True, pp=2, vp=2),
        Layout(4, pp=2, cp=2),
    ],
    "tiny_gpt_oss": [
        Layout(2),
        Layout(2, tp=2, sp=True),
        Layout(2, pp=2),
        Layout(2, pp=2, vp=2),
        Layout(2, ep=2),
        Layout(2, cp=2),
        Layout(2, tp=2, sp=True, ep=2),
        Layout(2, cp=2, ep=2),
        Layout(4, tp=2, sp=True, ep=2),
        Layout(4, pp=2, ep=2),
        Layout(4, pp=2, vp=2, ep=2),
        Layout(4, tp=2, sp=True, pp=2, ep=2),
        Layout(4, tp=2, sp=True, pp=2, vp=2, ep=2),
        Layout(4, pp=2, cp=2),
        Layout(4, ep=4),
        Layout(4, cp=2, ep=4),
    ],
}
CASES = [(kind, layout) for kind, layouts in KINDS.items() for layout in layouts]
LOSSES = ("loss/kd", "loss/ce", "kd/teacher_mass", "kd/student_mass", "kd/tail", "optim/grad_norm", "tokens")
# 5 held-out rows by twos and by eights: portions and ranks go short, and pipelines are filled up.
EVALUATED_BY = (2, 8)
Found = dict[tuple[str, Layout], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    common: dict[str, Any] = {
        "data": {"train_tokens": 48 * 4 * STEPS, "heldout_tokens": 48 * 5},
        "loss": {"ce_weight": 0.25},
        "optimizer": {"lr_warmup_iters": 0, "clip_grad": 0.5},
    }
    found = {}
    for kind in KINDS:
        place = folder / kind.replace(", ", "_")
        if kind == "tiny_gpt_oss":
            # The student is another random model: what a step does is seen at its largest.
            teacher, student = (tiny_gpt_oss_folder(folder / f"hf_{seed}", seed) for seed in (12, 13))
            models: dict[str, Any] = {
                "teacher": {"model": teacher.model_dump(mode="json")},
                "student": {
                    "from_teacher": None,
                    "model": student.model_dump(mode="json"),
                    "checkpoint": str(place / "student"),
                },
            }
        else:
            llama = yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text())
            untied = kind == "tiny_llama"
            llama |= {"untie_embeddings_and_output_weights": untied, "hf": str(tiny_llama_folder(untied))}
            # Of four layers, for two chunks on each of two stages.
            models = {"teacher": {"model": llama}, "student": {"from_teacher": {"ffn_hidden_size": 80}}}
        found[kind] = tiny_recipe(place, **models, **common)
    return found


def _whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.student.model.module.named_parameters()}


def _difference(trainer: Trainer, whole: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """The largest |w − w'| / |w' − w₀| over this rank's parameters: relative to how far the steps moved them."""
    from megatron_kd.models.parameters import places_in

    model: ModelConfig = trainer.recipe.student.model
    groups, worst = trainer.session.groups, 0.0
    for place, parameter in places_in(trainer.student.bare, model, groups):
        theirs, start = (
            place.shard(_merged(place, tensors[place.megatron_name], model), model, groups)
            for tensors in (whole, before)
        )
        worst = max(worst, float((parameter.detach() - theirs).norm() / (theirs - start).norm()))
    return worst


def _merged(place: Any, tensor: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """A parameter of the model on one rank as ``Layout.to_megatron`` gives it: unpadded, pairs in front."""
    if place.megatron_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensor = tensor[: model.vocab_size]
    return tensor.unflatten(0, (2, -1)) if place.entry.layout.paired else tensor


def _evaluated(trainer: Trainer, micro_batch_size: int) -> dict[str, float]:
    from megatron_kd.training.evaluate import evaluate_model

    session = trainer.session
    return evaluate_model(
        trainer.student.bare,
        session.evaluation,
        session.samples,
        session.evaluation_cached,
        session.groups,
        micro_batch_size,
    )


def _look(recipe: Path, layout: Layout) -> dict[str, Any]:
    trainer = Trainer(recipe_in(recipe, layout))
    before = _whole(trainer) if layout == ALONE else {}
    found: dict[str, Any] = {"curve": trainer.curve(STEPS)}
    file = recipe.parent / "weights.pt"
    if layout == ALONE:
        torch.save((_whole(trainer), before), file)
    else:
        found["parameters"] = _difference(trainer, *torch.load(file))
    found["evaluations"] = [_evaluated(trainer, size) for size in EVALUATED_BY]
    return found


def _rank(rank: int, world: int, recipes: dict[str, Path]) -> dict[tuple[str, Layout], dict[str, Any]]:
    from megatron_kd.models.convert import import_model

    found = {}
    for kind, recipe in recipes.items():
        if world == 1:
            alone = recipe_in(recipe, ALONE)
            make_inputs(alone)
            if alone.student.checkpoint is not None:
                import_model(alone, "student", show_progress=False)
        for layout in [ALONE, *KINDS[kind]]:
            if layout.world == world:
                found[kind, layout] = _look(recipe, layout)
    return found


@pytest.fixture(scope="module")
def found(recipes: dict[str, Path]) -> Found:
    """What each rank reports, by model and layout."""
    every: Found = {}
    for world in (1, 2, 4):
        ranks: list[dict[tuple[str, Layout], dict[str, Any]]] = run_distributed(_rank, world, recipes, timeout_s=400.0)
        every |= {case: [rank[case] for rank in ranks] for case in ranks[0]}
    figures = {}
    for kind, layout in CASES:
        alone, ranks_found = every[kind, ALONE][0]["curve"], every[kind, layout]
        figures[layouts_table.short(layout), kind] = (
            max(largest_difference(alone, rank["curve"], ("loss/kd", "loss/ce")) for rank in ranks_found),
            max(largest_difference(alone, rank["curve"], ("optim/grad_norm",)) for rank in ranks_found),
            max(rank["parameters"] for rank in ranks_found),
        )
    layouts_table.write("steps", figures)
    return every


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_on_shows_mistakes(found: Found, recipes: dict[str, Path], kind: str) -> None:
    recipe = recipe_in(recipes[kind], ALONE)
    samples = open_samples(recipe.data.samples)
    counts = [int(samples.loss_mask(i).sum()) for i in samples.split("train")]
    # Equal rows would hide a mean of means: micro batches, ranks and steps have unequal numbers of unmasked tokens.
    assert min(counts) < 8 and max(counts) > recipe.data.seq_length - 8 and len(set(counts)) > 10
    curve = found[kind, ALONE][0]["curve"]
    assert len({step["tokens"] for step in curve}) == STEPS
    assert min(step["optim/grad_norm"] for step in curve) > 0.5, "nothing was clipped"


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=lambda value: str(value))
def test_a_run_does_not_depend_on_the_layout(found: Found, kind: str, layout: Layout) -> None:
    alone = found[kind, ALONE][0]["curve"]
    for rank in found[kind, layout]:
        assert len(rank["curve"]) == STEPS
        for ours, theirs in zip(rank["curve"], alone, strict=True):
            expected = {name: theirs[name] for name in LOSSES}
            assert {name: ours[name] for name in LOSSES} == pytest.approx(expected, rel=TOLERANCE)
        # Adam makes steps of nearly equal size of gradients that differ by rounding alone.
        # After three steps of Adam a gradient that is all rounding still moves its weight by the whole rate.
        assert rank["parameters"] < 20 * TOLERANCE


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=lambda value: str(value))
def test_an_evaluation_does_not_depend_on_the_layout(found: Found, kind: str, layout: Layout) -> None:
    alone = found[kind, ALONE][0]["evaluations"][0]
    assert alone["eval/kd"] > 0 and alone["eval/unigram_kd"] > 0
    for rank in (*found[kind, layout], found[kind, ALONE][0]):
        for evaluation in rank["evaluations"]:
            assert evaluation == pytest.approx(alone, rel=TOLERANCE)


def test_the_page_has_a_row_for_every_layout() -> None:
    page = (ROOT / "docs/measurements.md").read_text()
    missing = [row for kind, layout in CASES if (row := f"| {layouts_table.short(layout)} | {kind} |") not in page]
    assert not missing, f"measure, then put the table of python -m tests.layouts_table there: {missing}"
