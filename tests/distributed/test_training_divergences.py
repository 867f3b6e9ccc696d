"""Training by every divergence: fused and dense give one curve, and it begins at the textbook's value.

Beside it what training tells the loss: how much a single pass may hold, how many microbatches are in flight, and
whether the head's gradient goes into ``main_grad``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_kd.data.batches import Batch, make_batch
from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.distributed.test_training_methods import gradient_error
from tests.training_runs import Layout, Trainer, largest_difference, make_inputs, recipe_in

STEPS, TOP_K, BETA = 5, 20, 0.3
ALONE = Layout(1)
# Several chunks a micro batch, no clipping, which would scale the gradients by their norm, and no idle first step.
EVERYWHERE = ["loss.chunk_mib=0.05", f"loss.beta={BETA}", "optimizer.clip_grad=0", "optimizer.lr_warmup_iters=0"]
# A student of its own, with one matrix for embedding and head.
TIED = [
    "student.from_teacher=null",
    "student.model.num_layers=2",
    "student.model.untie_embeddings_and_output_weights=false",
]


@dataclass(frozen=True)
class Case:
    """A loss; ``tail`` None is online with the teacher's whole distribution."""

    divergence: str
    tail: str | None = "bucket"
    temperature: float = 1.0
    ce_weight: float = 0.0

    def overrides(self, implementation: str) -> list[str]:
        """Of the recipe."""
        teacher = ["teacher.mode=online"] if self.tail is None else [f"loss.tail={self.tail}"]
        return [
            *EVERYWHERE,
            *teacher,
            f"loss.implementation={implementation}",
            f"loss.divergence={self.divergence}",
            f"loss.temperature={self.temperature}",
            f"loss.ce_weight={self.ce_weight}",
        ]


CASES = {
    "forward_kl": Case("forward_kl"),
    "reverse_kl": Case("reverse_kl"),
    "jsd": Case("jsd"),
    "tvd": Case("tvd"),
    "forward_kl, teacher renormalised": Case("forward_kl", "renormalize_teacher"),
    "forward_kl, T = 2": Case("forward_kl", temperature=2.0),
    "jsd over the set, T = 2, with cross-entropy": Case("jsd", "renormalize_both", 2.0, 0.3),
    "jsd, online": Case("jsd", None),
    "labels alone": Case("forward_kl", ce_weight=1.0),
}


def textbook(divergence: str, p: Tensor, q: Tensor) -> Tensor:
    """[n], of distributions [n, outcomes]; an outcome that p does not have adds nothing but to TVD."""
    has = p > 0
    if divergence == "forward_kl":
        return torch.where(has, p * (p / q).log(), 0.0).sum(dim=1)
    assert bool(has.all())
    if divergence == "reverse_kl":
        return (q * (q / p).log()).sum(dim=1)
    if divergence == "tvd":
        return (p - q).abs().sum(dim=1) / 2
    m = BETA * p + (1 - BETA) * q
    return (BETA * p * (p / m).log() + (1 - BETA) * q * (q / m).log()).sum(dim=1)


def _outcomes(case: Case, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What the divergence sees of two distributions over the vocabulary."""
    if case.tail is None:
        return p, q
    best = p.topk(TOP_K, dim=1).indices
    p_set, q_set = p.gather(1, best), q.gather(1, best)
    if case.tail == "renormalize_both":
        return p_set / p_set.sum(dim=1, keepdim=True), q_set / q_set.sum(dim=1, keepdim=True)
    p_tail, q_tail = 1 - p_set.sum(dim=1, keepdim=True), 1 - q_set.sum(dim=1, keepdim=True)
    if case.tail == "renormalize_teacher":
        p_set, p_tail = p_set / p_set.sum(dim=1, keepdim=True), torch.zeros_like(p_tail)
    return torch.cat([p_set, p_tail], dim=1), torch.cat([q_set, q_tail], dim=1)


@torch.no_grad()
def _expected(online: Trainer, batches: list[Batch], cases: dict[str, Case]) -> dict[str, float]:
    """The mean divergence of each case over some rows, in float64 from the logits of both models."""
    from tests.training_runs import position_ids

    recipe, teacher = online.recipe, online.session.distillation._teacher
    assert teacher is not None
    vocab = recipe.student.model.vocab_size
    totals, count = dict.fromkeys(cases, 0.0), 0
    for batch in batches:
        y = online.student.model.module(batch.tokens, position_ids(batch.tokens), None)  # [b, s, padded V]
        y = y.transpose(0, 1).flatten(0, 1)[:, :vocab].double()
        ((hidden, head),) = teacher.engine.hidden_states([batch.tokens])
        u = (hidden.flatten(0, 1).double() @ head.double().T)[:, :vocab]
        for name, case in cases.items():
            p, q = ((logits / case.temperature).softmax(dim=1) for logits in (u, y))
            kd = textbook(case.divergence, *_outcomes(case, p, q))
            totals[name] += float((kd * batch.token_weights).sum())
        count += batch.num_tokens
    return {name: total / count for name, total in totals.items()}


def _evaluate(trainer: Trainer) -> dict[str, float]:
    from megatron_kd.training.evaluate import evaluate_model

    session = trainer.session
    cached, evaluation = session.evaluation_cached, session.evaluation
    return evaluate_model(trainer.student.model.module, evaluation, session.samples, cached, session.groups, 1)


def _in_flight(trainer: Trainer) -> tuple[int, int]:
    """(most losses computed and not yet gone backward in one step, what training tells the loss)."""
    from megatron_kd.training.distill import microbatches_in_flight

    waiting, most = 0, 0

    def forward(_: Any, __: Any, loss: Tensor) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        loss.register_hook(backward)

    def backward(_: Tensor) -> None:
        nonlocal waiting
        waiting -= 1

    handle = trainer.student.model.register_forward_hook(forward)
    trainer.step()
    handle.remove()
    assert waiting == 0
    return most, microbatches_in_flight(trainer.student.model.module.config)


def _flops(recipe: Path, *overrides: str) -> int:
    trainer = Trainer(recipe_in(recipe, ALONE, *EVERYWHERE, *overrides))
    with FlopCounterMode(display=False) as counter:
        trainer.step()
    return int(counter.get_total_flops())


def _main_grad(recipe: Path, *overrides: str) -> dict[str, Any]:
    """Gradients of a step without and with the flag, and whether the loss has put the head's into main_grad."""
    found: dict[str, Any] = {}
    for fusion in (False, True):
        trainer = Trainer(recipe_in(recipe, ALONE, *EVERYWHERE, *overrides))
        module = trainer.student.model.module
        # Set behind the model's back: its layers would want a GPU kernel of apex, the loss wants none.
        module.config.gradient_accumulation_fusion = fusion
        trainer.step()
        found[f"gradients {fusion}"] = trainer.gradients()
        found[f"added {fusion}"] = _head(module).grad_added_to_main_grad
    return found


def _labels_alone(recipe: Path) -> dict[str, Any]:
    """The first step on labels alone, beside torch's own cross-entropy over dense logits and its gradients.

    Once more with other targets: of another K, at another temperature.
    """
    from tests.training_runs import position_ids

    case = CASES["labels alone"]
    trainer = Trainer(recipe_in(recipe, ALONE, *case.overrides("fused")))
    module, vocab = trainer.student.model.module, trainer.recipe.student.model.vocab_size
    total, tokens = torch.zeros(()), 0
    for batch in trainer._reader(0):
        y = module(batch.tokens, position_ids(batch.tokens), None).transpose(0, 1).flatten(0, 1)[:, :vocab]
        counted = (batch.token_weights != 0) & (batch.labels >= 0)
        total = total + torch.nn.functional.cross_entropy(y[counted], batch.labels[counted], reduction="sum")
        tokens += batch.num_tokens
    names, parameters = zip(*module.named_parameters(), strict=True)
    dense = torch.autograd.grad(total / tokens, parameters)
    step = trainer.step()
    other = Trainer(recipe_in(recipe, ALONE, *case.overrides("fused"), "teacher.top_k=2", "loss.temperature=2.0"))
    other.step()
    return {
        "loss": step["loss/total"],
        "expected loss": float(total / tokens),
        "gradients": trainer.gradients(),
        "expected": {name: gradient.double().numpy() for name, gradient in zip(names, dense, strict=True)},
        "of other targets": other.gradients(),
    }


def _head(module: Any) -> Any:
    tied = module.share_embeddings_and_output_weights
    return module.shared_embedding_or_output_weight() if tied else module.output_layer.weight


def _rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    make_inputs(recipe_in(recipe, ALONE))
    found: dict[str, Any] = {"curves": {}, "evaluated": {}}
    trainer = Trainer(recipe_in(recipe, ALONE, *CASES["jsd, online"].overrides("fused")))
    samples = trainer.session.samples
    heldout = [make_batch(samples, [i], None) for i in samples.split("heldout")]
    # Where there is a cache, it measures the held-out rows of an online run too.
    measured = {name: replace(case, tail=case.tail or "bucket") for name, case in CASES.items()}
    found["expected"] = _expected(trainer, trainer._reader(0), CASES)
    found["expected of heldout"] = _expected(trainer, heldout, measured)
    for name, case in CASES.items():
        for implementation in ("dense", "fused"):
            trainer = Trainer(recipe_in(recipe, ALONE, *case.overrides(implementation)))
            if implementation == "fused":
                found["evaluated"][name] = _evaluate(trainer)
            curve = trainer.curve(STEPS)
            trainer.student.iteration = 0  # the rows of the first step once more: what has been learnt of them
            found["curves"][name, implementation] = [*curve, trainer.step()]
    fewer = [*CASES["jsd"].overrides("fused"), "teacher.top_k=3"]
    found["evaluated"]["jsd, of a smaller K"] = _evaluate(Trainer(recipe_in(recipe, ALONE, *fewer)))
    found["labels alone"] = _labels_alone(recipe)
    trainer = Trainer(recipe_in(recipe, ALONE, *CASES["jsd, online"].overrides("fused")))
    found["in flight"] = _in_flight(trainer)
    shape = trainer.student.model.module.output_layer.weight.shape
    single = (trainer.recipe.student.model.vocab_size * shape[1] + 48 * shape[1]) * 4 / 2**20  # dW and dH
    found["flops"] = {
        "auto": _flops(recipe),
        "just enough": _flops(recipe, f"loss.gradient_mib={single + 1e-5}"),
        "too little": _flops(recipe, f"loss.gradient_mib={single - 1e-5}"),
        "recompute": _flops(recipe, "loss.mode=recompute", "loss.gradient_mib=100"),
    }
    found["main_grad"] = {
        "untied": _main_grad(recipe),
        "tied": _main_grad(recipe, *TIED),
        "tied, recompute": _main_grad(recipe, *TIED, "loss.mode=recompute"),
    }
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("divergences"), teacher={"temperatures": [1.0, 2.0], "top_k": TOP_K})


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_distributed(_rank, 1, recipe)[0]
    return result


@pytest.mark.parametrize("name", CASES)
def test_fused_has_the_curve_of_dense(found: dict[str, Any], name: str) -> None:
    dense, fused = (found["curves"][name, implementation] for implementation in ("dense", "fused"))
    assert dense[-1]["loss/total"] < 0.95 * dense[0]["loss/total"], "a student that learns nothing shows nothing"
    assert largest_difference(dense, fused, ("loss/kd", "loss/total", "optim/grad_norm")) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_first_loss_is_the_textbook_s(found: dict[str, Any], name: str) -> None:
    """The cache rounds log-probabilities to float16; online nothing is rounded."""
    case = CASES[name]
    expected = case.temperature**2 * found["expected"][name]
    tolerance = 2e-6 if case.tail is None else 2e-4
    assert found["curves"][name, "fused"][0]["loss/kd"] == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_by_the_recipe_s_divergence_without_t2(found: dict[str, Any], name: str) -> None:
    evaluated = found["evaluated"][name]
    assert evaluated["eval/kd"] == pytest.approx(found["expected of heldout"][name], rel=2e-4)
    # A forward KL of a unigram model stands beside no other divergence.
    assert ("eval/unigram_kd" in evaluated) == (replace(CASES[name], ce_weight=0.0) == Case("forward_kl"))


def test_the_forward_kl_is_measured_whatever_is_trained_on(found: dict[str, Any]) -> None:
    """Over all tokens of the cache at temperature 1, of one fresh student: the same figure for every run."""
    expected = found["expected of heldout"]["forward_kl"]
    for name, evaluated in found["evaluated"].items():
        assert evaluated["eval/forward_kl"] == pytest.approx(expected, rel=2e-4), name
    assert found["evaluated"]["forward_kl"]["eval/forward_kl"] == found["evaluated"]["forward_kl"]["eval/kd"]
    smaller = found["evaluated"]["jsd, of a smaller K"]
    assert smaller["eval/kd"] < found["evaluated"]["jsd"]["eval/kd"], "a coarser bucket divides less"


def test_labels_alone_train_as_plain_cross_entropy_does(found: dict[str, Any]) -> None:
    seen = found["labels alone"]
    assert seen["loss"] == pytest.approx(seen["expected loss"], rel=1e-5)
    assert gradient_error(seen["expected"], seen["gradients"]) < 1e-5
    assert gradient_error(seen["gradients"], seen["of other targets"]) < 1e-5, "the teacher has no say"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ce_weight])
def test_cross_entropy_has_its_share(found: dict[str, Any], name: str) -> None:
    w = CASES[name].ce_weight
    for step in found["curves"][name, "fused"]:
        assert step["loss/total"] == pytest.approx((1 - w) * step["loss/kd"] + w * step["loss/ce"], rel=1e-6)


def test_one_microbatch_is_in_flight(found: dict[str, Any]) -> None:
    seen, told = found["in flight"]
    assert seen == told == 1


def test_auto_recomputes_where_a_single_pass_would_hold_too_much(found: dict[str, Any], recipe: Path) -> None:
    """One projection more, to the FLOP: 2·N·D·V over the unmasked rows of the step."""
    flops = found["flops"]
    model = recipe_in(recipe, ALONE).student.model
    projection = 2 * found["curves"]["forward_kl", "fused"][0]["tokens"] * model.hidden_size * model.vocab_size
    assert flops["auto"] == flops["just enough"] == flops["recompute"] - projection
    assert flops["too little"] == flops["recompute"]


@pytest.mark.parametrize("head", ["untied", "tied", "tied, recompute"])
def test_the_flag_has_the_loss_add_to_main_grad(found: dict[str, Any], head: str) -> None:
    seen = found["main_grad"][head]
    assert (seen["added False"], seen["added True"]) == (False, True)
    assert gradient_error(seen["gradients False"], seen["gradients True"]) < 1e-5
