"""Packed documents train and are taught as each alone, in every layout; none hears of another."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.training_runs import Layout, Trainer, curve_of, largest_difference, leave_layout, make_inputs, recipe_in

STEPS, SEQ, ROWS = 2, 64, 4
ALONE = Layout(1)
LAYOUTS = [Layout(2, tp=2, sp=True), Layout(2, cp=2, micro=2), Layout(2, pp=2)]
ONLINE = ("teacher.mode=online", "teacher.targets=top_k")


def spans(documents: Tensor) -> list[tuple[int, int]]:
    ends = (documents[1:] != documents[:-1]).nonzero().flatten() + 1
    bounds = [0, *ends.tolist(), len(documents)]
    return list(pairwise(bounds))


def _alone(recipe: Path) -> dict[str, Any]:
    """The first step on whole rows and on each document by itself: teacher's targets, loss and gradient sums."""
    from megatron_kd.data.batches import Batch, make_batch
    from megatron_kd.data.samples import open_samples
    from megatron_kd.targets import TopKTargets
    from megatron_kd.teacher.hf_engine import HFTeacher
    from megatron_kd.teacher.megatron_engine import MegatronTeacher
    from megatron_kd.training.sums import FIELDS

    loaded = recipe_in(recipe, ALONE, f"training.micro_batch_size={ROWS}")
    trainer = Trainer(loaded)
    session = trainer.session
    samples = open_samples(loaded.data.samples)
    packed = make_batch(samples, range(ROWS), session.cached)
    assert packed.documents is not None and packed.targets is not None
    teacher = MegatronTeacher(loaded, session.groups)
    hf = HFTeacher(recipe_in(recipe, ALONE, "teacher.engine=hf")).top_k(packed.tokens, packed.documents).targets

    def run(batches: list[Batch]) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
        loss, total = 0.0, 0.0
        gradients: dict[str, np.ndarray[Any, Any]] = {}
        for batch in batches:
            trainer.student.model.zero_grad_buffer()
            (sums,) = session.distillation.run(
                trainer.student.model, [batch], seq_length=batch.tokens.shape[1], forward_only=False
            )
            tokens = float(sums[FIELDS.index("tokens")])
            loss, total = loss + float(sums[FIELDS.index("total")]), total + tokens
            for name, gradient in trainer.gradients().items():
                gradients[name] = gradients.get(name, 0.0) + gradient * tokens
        return loss, gradients

    batches, apart = [], 0.0
    labels, weights = (part.view(SEQ, ROWS) for part in (packed.labels, packed.token_weights))
    cached = [part.unflatten(0, (SEQ, ROWS)) for part in (packed.targets.logprobs, packed.targets.tail_logmass)]
    others = hf.logprobs.unflatten(0, (SEQ, ROWS))
    for row in range(ROWS):
        for start, stop in spans(packed.documents[row]):
            tokens = packed.tokens[row : row + 1, start:stop]
            targets: TopKTargets = teacher.top_k(tokens).targets  # type: ignore[union-attr]
            for found, exact in (
                (cached[0][start:stop, row], targets.logprobs),
                (cached[1][start:stop, row], targets.tail_logmass),
                (others[start:stop, row], targets.logprobs),
            ):
                apart = max(apart, float((found - exact).abs().max()))
            if weights[start:stop, row].any():
                mine = labels[start:stop, row].contiguous(), weights[start:stop, row].contiguous()
                batches.append(Batch((row,), tokens, *mine, targets))
    loss, gradients = run([packed])
    loss_alone, gradients_alone = run(batches)
    worst = max(
        float(np.abs(gradients[name] - exact).max() / np.abs(exact).max()) for name, exact in gradients_alone.items()
    )
    return {
        "documents": len(batches),
        "targets apart": apart,
        "loss apart": abs(loss / loss_alone - 1),
        "gradients apart": worst,
        "heard": _heard(trainer, packed.tokens, packed.documents),
    }


@torch.no_grad()
def _heard(trainer: Trainer, tokens: Tensor, documents: Tensor) -> dict[str, float]:
    """How far the hidden states of the second document and of the first move with the tokens of the first."""
    from megatron_kd.data.context_slice import WHOLE

    model = trainer.student.model.module

    def hidden(tokens: Tensor, numbers: Tensor | None) -> Tensor:
        places = WHOLE.places(tokens, numbers)
        found: Tensor = model(tokens, places, numbers, output_processor=lambda *, hidden_states, **_: hidden_states)
        return found[:, 0]

    row = next(i for i in range(ROWS) if len(spans(documents[i])) > 2)
    (_, first), (_, second), *_ = spans(documents[row])
    before, numbers = tokens[row : row + 1], documents[row : row + 1]
    changed = before.clone()
    changed[:, :first] = (changed[:, :first] + 7) % 100
    angles: list[Tensor] = []
    handle = model.rotary_pos_emb.register_forward_hook(lambda _module, _inputs, output: angles.append(output))
    moved = (hidden(changed, numbers) - hidden(before, numbers)).abs()
    handle.remove()
    crossing = (hidden(changed, None) - hidden(before, None)).abs()
    return {
        "turned at the second": float(angles[0][first].abs().max()),
        "turned before it": float(angles[0][first - 1].abs().max()),
        "own": float(moved[:first].max()),
        "others": float(moved[first:].max()),
        "without documents": float(crossing[first:second].max()),
    }


def _scored(recipe: Path, layout: Layout) -> float:
    """How far the answers of a teacher in this layout, as a capture asks it, are from the cached ones."""
    from megatron_kd.data.samples import open_samples
    from megatron_kd.teacher.megatron_engine import MegatronTeacher
    from megatron_kd.teacher.score import score
    from megatron_kd.training.session import open_session

    loaded = recipe_in(recipe, layout, "teacher.capture.micro_batch_size=3")
    leave_layout()
    session = open_session(loaded)
    assert session.cached is not None
    cached = session.cached.targets(range(ROWS))
    extracted = score(MegatronTeacher(loaded, session.groups), open_samples(loaded.data.samples).rows(range(ROWS)))
    if extracted is None:
        return np.inf
    found = extracted.targets
    pairs = (found.logprobs, cached.logprobs), (found.tail_logmass, cached.tail_logmass)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if world == 1:
        make_inputs(recipe_in(recipe, ALONE), masked=False)
        found["alone"] = _alone(recipe)
    for layout in (ALONE, *LAYOUTS):
        if layout.world == world:
            found[str(layout)] = curve_of(recipe_in(recipe, layout), STEPS)
            found[f"{layout} online"] = curve_of(recipe_in(recipe, layout, *ONLINE), STEPS)
            found[f"{layout} targets apart"] = _scored(recipe, layout)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks found, by name: the last one, which has the answers of a pipeline."""
    folder = tmp_path_factory.mktemp("packed")
    words = ["An", "expression", "is", "a", "statement"]
    texts = [" ".join(words[(i * j + j) % 5] for j in range(3 + i % 11)) for i in range(99)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {
        "packing": "documents",
        "seq_length": SEQ,
        "train_tokens": 8 * SEQ,
        "heldout_tokens": None,
        "corpus": {"format": "jsonl", "paths": [str(folder / "texts.jsonl")]},
    }
    capture = {"value_dtype": "float32", "rows_per_shard": 16}
    recipe = tiny_recipe(folder, data=data, teacher={"capture": capture})
    return {name: value for world in (1, 2) for name, value in run_distributed(_rank, world, recipe)[-1].items()}


def test_packed_documents_are_as_each_alone(found: dict[str, Any]) -> None:
    alone = found["alone"]
    assert alone["documents"] > ROWS + 2, "rows of one document show nothing"
    assert alone["targets apart"] < 5e-5
    assert alone["loss apart"] < 1e-5
    assert alone["gradients apart"] < 1e-4


def test_no_document_hears_another(found: dict[str, Any]) -> None:
    heard = found["alone"]["heard"]
    assert heard["others"] == 0.0
    assert heard["turned at the second"] == 0.0 and heard["turned before it"] > 1.0, "positions begin anew"
    assert heard["own"] > 0.1 and heard["without documents"] > 0.01


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_curves_do_not_depend_on_the_layout(found: dict[str, Any], layout: Layout) -> None:
    assert found[f"{layout} targets apart"] < 5e-5
    for name in ("", " online"):
        assert largest_difference(found[f"{ALONE}{name}"], found[f"{layout}{name}"]) < 1e-4


def test_an_online_teacher_says_what_was_captured(found: dict[str, Any]) -> None:
    assert largest_difference(found[str(ALONE)], found[f"{ALONE} online"]) < 1e-5
