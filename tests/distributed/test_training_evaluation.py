"""Details of an evaluation: against float64 on whole logits, and the same however the model is spread over ranks."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from megatron_kd.data.batches import Batch, make_batch
from megatron_kd.data.packing import labels_of
from megatron_kd.testing import run_distributed
from tests.assets import ROOT, TINY_TEXT, tiny_llama_folder, tiny_recipe
from tests.training_runs import Layout, Trainer, make_inputs, recipe_in

ALONE = Layout(1)
OTHERS = [
    Layout(1, micro=4),
    Layout(2, tp=2, sp=True),
    Layout(2, tp=2, micro=2),
    Layout(2, pp=2),
    Layout(2, cp=2, micro=2),
    Layout(2),
    Layout(4, tp=2, sp=True, pp=2),
    Layout(4, tp=2, sp=True, cp=2),
]
TOP_K = 20
ONLINE = ("teacher.mode=online", "teacher.cache=null")
CASES = {
    "offline": (),
    "online": ONLINE,
    "temperature 2": ("loss.temperature=2.0",),
    "three kept": ("teacher.top_k=3",),
}
SPREAD = ("offline", "online")
"""Cases that are evaluated in all layouts."""


def _teacher_with_opinions(folder: Path) -> Path:
    """The tiny Llama with a head fitted to its text: some answers are right, and some of these are sure."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer, LlamaForCausalLM

    source = tiny_llama_folder()
    model, tokenizer = LlamaForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer("".join(topics[key] for key in sorted(topics)[:TINY_TEXT])).input_ids)
    rows = ids[: 400 * 48].view(400, 48)
    with torch.no_grad():
        hidden = model.model(rows).last_hidden_state[:, :-1].flatten(0, 1)
        following = torch.zeros(len(hidden), model.config.vocab_size).scatter_(1, rows[:, 1:].reshape(-1, 1), 1.0)
        fitted = torch.linalg.lstsq(hidden, following).solution.t()
        model.lm_head.weight.copy_(100 * fitted)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _evaluate(recipe: Path, layout: Layout, *overrides: str) -> dict[str, Any]:
    from megatron_kd.training.evaluate import evaluate_model
    from megatron_kd.training.evaluation_details import EvaluationDetails

    # Several chunks a micro batch.
    trainer = Trainer(recipe_in(recipe, layout, "loss.chunk_mib=0.02", *overrides))
    session = trainer.session
    details = EvaluationDetails(trainer.recipe, session.evaluation, session.groups)
    result = evaluate_model(
        trainer.student.model.module,
        session.evaluation,
        session.samples,
        session.evaluation_cached,
        session.groups,
        layout.micro,
        observe=details.observe,
    )
    means, tables = details.finish()
    return {**result, **means, **tables}


@torch.no_grad()
def _logits(trainer: Trainer, batch: Batch, teacher: bool) -> NDArray[np.float64]:
    """[b, s, V] in float64, by a forward pass that ends in logits."""
    from tests.training_runs import position_ids

    vocab = trainer.recipe.student.model.vocab_size
    if teacher:
        asked = trainer.session.distillation._teacher
        assert asked is not None
        ((hidden, head),) = asked.engine.hidden_states([batch.tokens])
        whole = (hidden.double() @ head.double().T).transpose(0, 1)
    else:
        whole = trainer.student.model.module(batch.tokens, position_ids(batch.tokens), None)
    return np.asarray(whole[:, :, :vocab].double())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _tokens(recipe: Path) -> list[dict[str, Any]]:
    """Each unmasked token of the held-out rows: its place, its label and the logits of both models."""
    trainer = Trainer(recipe_in(recipe, ALONE, *ONLINE))
    samples = trainer.session.samples
    found = []
    for sample in samples.split("heldout"):
        batch = make_batch(samples, [sample], None)
        student, teacher = (_logits(trainer, batch, of_teacher)[0] for of_teacher in (False, True))
        labels = labels_of(samples.tokens(sample), samples.loss_mask(sample))
        for place in np.flatnonzero(samples.loss_mask(sample)):
            found.append({"place": int(place), "label": int(labels[place]), "y": student[place], "u": teacher[place]})
    return found


def _rank(rank: int, world: int, recipe: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if world == 1:
        make_inputs(recipe_in(recipe, ALONE))
        found["tokens"] = _tokens(recipe)
        for name, overrides in CASES.items():
            found[name, ALONE] = _evaluate(recipe, ALONE, *overrides)
    for layout in OTHERS:
        if layout.world == world:
            for name in SPREAD:
                found[name, layout] = _evaluate(recipe, layout, *CASES[name])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """What each rank says, by case and layout, and the tokens of one rank."""
    folder = tmp_path_factory.mktemp("evaluation")
    model = yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text())
    model["hf"] = str(_teacher_with_opinions(folder / "hf"))
    recipe = tiny_recipe(folder, teacher={"model": model, "temperatures": [1.0, 2.0], "top_k": TOP_K})
    result: dict[Any, list[Any]] = {}
    for world in (1, 2, 4):
        ranks: list[dict[Any, Any]] = run_distributed(_rank, world, recipe)
        result |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return result


def _expected(tokens: list[dict[str, Any]], temperature: float, top_k: int, bucket: bool) -> list[dict[str, Any]]:
    """The figures of each token by their definitions, one at a time, from whole distributions in float64."""
    figures = []
    for token in tokens:
        q1, q, p = (_log_softmax(x) for x in (token["y"], token["y"] / temperature, token["u"] / temperature))
        order = np.argsort(-p, kind="stable")
        kept, tail = order[:top_k], order[top_k:]
        p_tail, q_tail = (float(np.exp(x[tail]).sum()) for x in (p, q))
        kd = float((np.exp(p[kept]) * (p[kept] - q[kept])).sum()) + p_tail * math.log(p_tail / q_tail)
        best, mine = set(order[: min(5, top_k)].tolist()), set(np.argsort(-q1)[:5].tolist())
        figures.append(
            {
                "place": token["place"],
                "kd": kd if bucket else float((np.exp(p) * (p - q)).sum()),
                "ce": -float(q1[token["label"]]),
                "top1_agreement": float(order[0] == q1.argmax()),
                "top5_agreement": len(best & mine) / len(best),
                "teacher_top1_in_top5": float(order[0] in mine),
                "teacher_entropy": -float((np.exp(p[kept]) * p[kept]).sum()) - p_tail * math.log(p_tail),
                "student": (math.exp(q1.max()), q1.argmax() == token["label"]),
                # On a bin's edge the rounding of the cache decides.
                "teacher": (math.exp(np.float16(p.max()) if bucket else p.max()), p.argmax() == token["label"]),
            }
        )
    return figures


def _mean(figures: list[dict[str, Any]], name: str) -> float:
    return sum(token[name] for token in figures) / len(figures)


def _table(figures: list[dict[str, Any]], key: str, ranges: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    rows = []
    for start, end in ranges:
        within = [token for token in figures if start <= token[key] and (end is None or token[key] < end)]
        if within:
            shown = ("kd", "ce", "top1_agreement", "top5_agreement")
            last = end if key == "teacher_entropy" else end - 1
            rows.append({"from": start, "to": last, "tokens": len(within), **{n: _mean(within, n) for n in shown}})
    return rows


def _reliability(figures: list[dict[str, Any]], whose: str) -> tuple[float, list[dict[str, Any]]]:
    rows, error = [], 0.0
    for number in range(15):
        within = [token[whose] for token in figures if number / 15 < token[whose][0] <= (number + 1) / 15]
        if within:
            confidence, accuracy = (sum(pair[i] for pair in within) / len(within) for i in (0, 1))
            error += len(within) / len(figures) * abs(confidence - accuracy)
            row = {"from": number / 15, "to": (number + 1) / 15, "tokens": len(within)}
            rows.append({**row, "confidence": confidence, "accuracy": accuracy})
    return error, rows


def _same(got: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float) -> None:
    assert len(got) == len(expected) > 1
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_details_are_those_of_whole_distributions(found: dict[Any, list[Any]], case: str) -> None:
    """The cache rounds log-probabilities to float16; online nothing is rounded."""
    temperature, top_k = 2.0 if case == "temperature 2" else 1.0, 3 if case == "three kept" else TOP_K
    rel = 1e-4 if case == "online" else 2e-3
    figures = _expected(found["tokens"][0], temperature, top_k, case != "online")
    got = found[case, ALONE][0]
    assert got["eval/tokens"] == len(figures)
    for name in ("kd", "ce", "top1_agreement", "top5_agreement", "teacher_top1_in_top5", "teacher_entropy"):
        assert got[f"eval/{name}"] == pytest.approx(_mean(figures, name), rel=rel), name
    powers = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 48)]
    edges = [0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, None]
    _same(got["by_position"], [row | {"to": min(row["to"], 47)} for row in _table(figures, "place", powers)], rel)
    _same(got["by_entropy"], _table(figures, "teacher_entropy", list(pairwise(edges))), rel)
    for whose, prefix in (("student", ""), ("teacher", "teacher_")):
        if whose == "teacher" and temperature != 1.0:
            assert "eval/teacher_ece" not in got and "teacher_reliability" not in got
            continue
        error, rows = _reliability(figures, whose)
        assert got[f"eval/{prefix}ece"] == pytest.approx(error, rel=rel)
        assert 0 < got[f"eval/{prefix}accuracy"] == pytest.approx(np.mean([token[whose][1] for token in figures]))
        _same(got[f"{prefix}reliability"], rows, rel)


@pytest.mark.parametrize("case", SPREAD)
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_details_do_not_depend_on_the_layout(found: dict[Any, list[Any]], case: str, layout: Layout) -> None:
    alone = found[case, ALONE][0]
    for rank in found[case, layout]:
        assert rank.keys() == alone.keys()
        for name, value in alone.items():
            if isinstance(value, list):
                _same(rank[name], value, 1e-5)
            else:
                assert rank[name] == pytest.approx(value, rel=1e-5), name


def test_tables_add_up_to_the_means(found: dict[Any, list[Any]]) -> None:
    got = found["offline", ALONE][0]
    json.dumps(got)
    for table in ("by_position", "by_entropy"):
        assert sum(row["tokens"] for row in got[table]) == got["eval/tokens"]
        for name in ("kd", "ce", "top1_agreement", "top5_agreement"):
            total = sum(row[name] * row["tokens"] for row in got[table])
            assert total / got["eval/tokens"] == pytest.approx(got[f"eval/{name}"], rel=1e-6)
