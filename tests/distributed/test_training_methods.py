"""The four methods of a recipe: equal gradients and curves where they are equal, and the gap where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_kd.data.batches import make_batch
from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.training_runs import Layout, Trainer, largest_difference, make_inputs, recipe_in

STEPS = 20
METHODS = {
    "dense": ["loss.implementation=dense"],
    "forward_chunked": ["loss.implementation=forward_chunked"],
    "fused, single pass": ["loss.implementation=fused", "loss.mode=single_pass"],
    "fused, recompute": ["loss.implementation=fused", "loss.mode=recompute"],
}
ONLINE = {"full": ["teacher.mode=online"], "top_k": ["teacher.mode=online", "teacher.targets=top_k"]}
# Several chunks a micro batch, and no clipping, which would scale the gradients by their norm.
EVERYWHERE = ["loss.chunk_mib=0.05", "optimizer.clip_grad=0"]


def gradient_error(one: dict[str, np.ndarray[Any, Any]], other: dict[str, np.ndarray[Any, Any]]) -> float:
    """The largest |g − g'| / |g| over all parameters."""
    assert one.keys() == other.keys() and len(one) > 8
    assert all(np.linalg.norm(gradient) > 0 for gradient in one.values())
    return float(max(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(one[name]) for name in one))


def _student_logits(trainer: Trainer, tokens: Tensor) -> Tensor:
    """[s·b, V] in float64, from the model alone."""
    from tests.training_runs import position_ids

    logits = trainer.student.model.module(tokens, position_ids(tokens), None)  # [b, s, padded V]
    return logits.transpose(0, 1).flatten(0, 1)[:, : trainer.recipe.student.model.vocab_size].double()


def _expected(trainer: Trainer) -> dict[str, float]:
    """Mean KL of the first global batch by the textbook, in float64: of the whole vocabulary, and over the bucket."""
    recipe, totals = trainer.recipe, {"full": 0.0, "bucket": 0.0, "within the tail": 0.0}
    count = 0
    teacher = trainer.session.distillation._teacher
    assert teacher is not None
    with torch.no_grad():
        for batch in trainer._reader(0):
            ((hidden, head),) = teacher.engine.hidden_states([batch.tokens])
            logits = (hidden.flatten(0, 1).double() @ head.double().T)[:, : recipe.teacher.model.vocab_size]
            p = logits.log_softmax(dim=1)
            q = _student_logits(trainer, batch.tokens).log_softmax(dim=1)
            kept = torch.zeros_like(p, dtype=torch.bool).scatter_(1, p.topk(recipe.teacher.top_k).indices, True)
            p_tail = p.masked_fill(kept, -torch.inf).logsumexp(dim=1)
            q_tail = q.masked_fill(kept, -torch.inf).logsumexp(dim=1)
            terms = p.exp() * (p - q)
            full = terms.sum(dim=1)
            bucket = (terms * kept).sum(dim=1) + p_tail.exp() * (p_tail - q_tail)
            within = (terms * ~kept).sum(dim=1) - p_tail.exp() * (p_tail - q_tail)
            for name, values in (("full", full), ("bucket", bucket), ("within the tail", within)):
                totals[name] += float((values * batch.token_weights).sum())
            count += batch.num_tokens
    return {name: total / count for name, total in totals.items()}


def _targets(trainer: Trainer) -> list[tuple[Any, Any]]:
    """(cached, computed now) targets of the first micro batches."""
    from megatron_kd.data.cached_targets import CachedTargets

    recipe, teacher = trainer.recipe, trainer.session.distillation._teacher
    assert recipe.teacher.cache is not None and teacher is not None
    cached = CachedTargets(
        recipe.teacher.cache, trainer.session.samples, teacher=recipe.teacher.model, top_k=20, temperature=1.0
    )
    pairs = []
    for batch in trainer._reader(0):
        stored = make_batch(trainer.session.samples, batch.sample_ids, cached).targets
        online = teacher.engine.top_k(batch.tokens)
        assert online is not None
        pairs.append((stored, online.targets))
    return pairs


def _rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    make_inputs(recipe_in(recipe, Layout(1)))
    found: dict[str, Any] = {"curves": {}, "gradients": {}}
    for name, overrides in METHODS.items():
        trainer = Trainer(recipe_in(recipe, Layout(1), *EVERYWHERE, *overrides))
        first = trainer.step()
        found["gradients"][name] = trainer.gradients()
        found["curves"][name] = [first, *trainer.curve(STEPS - 1)]
    for name, overrides in ONLINE.items():
        trainer = Trainer(recipe_in(recipe, Layout(1), *EVERYWHERE, *overrides))
        if name == "full":
            found["expected"], found["targets"] = _expected(trainer), _targets(trainer)
        found["curves"][name] = trainer.curve(STEPS)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_distributed(_rank, 1, tiny_recipe(tmp_path_factory.mktemp("methods")))[0]
    return result


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
def test_offline_methods_have_the_gradients_of_dense(found: dict[str, Any], name: str) -> None:
    assert gradient_error(found["gradients"]["dense"], found["gradients"][name]) < 1e-5


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
def test_offline_methods_have_the_curve_of_dense(found: dict[str, Any], name: str) -> None:
    dense = found["curves"]["dense"]
    assert dense[-1]["loss/kd"] < 0.9 * dense[0]["loss/kd"]
    assert largest_difference(dense, found["curves"][name]) < 1e-4


def test_first_losses_are_those_of_the_textbook(found: dict[str, Any]) -> None:
    expected, curves = found["expected"], found["curves"]
    assert curves["full"][0]["loss/kd"] == pytest.approx(expected["full"], rel=2e-6)
    assert curves["top_k"][0]["loss/kd"] == pytest.approx(expected["bucket"], rel=2e-6)


def test_online_targets_are_the_cached_ones_before_their_rounding(found: dict[str, Any]) -> None:
    for stored, computed in found["targets"]:
        assert torch.equal(stored.ids, computed.ids)
        assert torch.equal(stored.logprobs, computed.logprobs.to(torch.float16))
        assert torch.equal(stored.tail_logmass, computed.tail_logmass)


def test_online_top_k_is_offline_up_to_the_rounding_of_the_cache(found: dict[str, Any]) -> None:
    online, offline = found["curves"]["top_k"], found["curves"]["fused, single pass"]
    assert largest_difference(online, offline) > 0, "the cache rounds"
    # A log-probability of size x is stored within x·2^-11, and errors of either sign average out over tokens.
    assert largest_difference(online, offline) < 1e-3


def test_offline_is_a_lower_bound_of_online_and_the_gap_lies_within_the_tail(found: dict[str, Any]) -> None:
    full, bucket = found["curves"]["full"], found["curves"]["top_k"]
    assert all(a["loss/kd"] > b["loss/kd"] for a, b in zip(full, bucket, strict=True))
    gap = full[0]["loss/kd"] - bucket[0]["loss/kd"]
    assert gap == pytest.approx(found["expected"]["within the tail"], rel=1e-4)


def test_norm_is_reported_without_clipping(found: dict[str, Any]) -> None:
    gradients, first = found["gradients"]["dense"], found["curves"]["dense"][0]
    expected = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    assert first["optim/grad_norm"] == pytest.approx(expected, rel=1e-5)
