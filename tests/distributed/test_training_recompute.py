"""Activations that are computed again in the backward pass: the same gradients, less memory, the loss computed once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_kd.config import ModelConfig
from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.models_oracles import grouped_model, tiny_gpt_oss, tiny_qwen3
from tests.training_runs import Layout, Trainer, make_inputs, recipe_in

ALONE = Layout(1)
STAGES = Layout(4, tp=2, sp=True, pp=2)
CONTEXT = Layout(4, pp=2, cp=2)
EXPERTS = Layout(4, tp=2, sp=True, pp=2, ep=2)
VOCABULARY = 1003
MODELS: dict[str, ModelConfig] = {
    "llama": grouped_model(num_layers=4, vocab_size=VOCABULARY),
    "qwen3": tiny_qwen3(num_layers=4, vocab_size=VOCABULARY),
    "gpt_oss": tiny_gpt_oss(),
}
FULL, SELECTIVE = "recompute_granularity: full", "recompute_granularity: selective"
WAYS = {
    "full": FULL,
    "block": f"{FULL}, recompute_method: block, recompute_num_layers: 2",
    "core_attn": SELECTIVE,
    "mlp": f"{SELECTIVE}, recompute_modules: [mlp]",
    "moe": f"{SELECTIVE}, recompute_modules: [moe]",
    "core_attn, mlp": f"{SELECTIVE}, recompute_modules: [core_attn, mlp]",
    "core_attn, moe": f"{SELECTIVE}, recompute_modules: [core_attn, moe]",
}
CASES = [
    *(("llama", ALONE, way) for way in ("full", "block", "core_attn", "mlp")),
    ("qwen3", ALONE, "full"),
    *(("gpt_oss", ALONE, way) for way in ("full", "core_attn", "moe")),
    ("llama", STAGES, "full"),
    ("llama", CONTEXT, "core_attn, mlp"),
    ("gpt_oss", EXPERTS, "full"),
    ("gpt_oss", EXPERTS, "core_attn, moe"),
]


@dataclass(frozen=True)
class Step:
    """What a step came to on one rank.

    Attributes:
        saved: the most bytes of storages that autograd kept at once.
        passes: forward passes of each layer of the model, of a micro batch.
        losses: losses computed, of a micro batch.
    """

    metrics: dict[str, float]
    gradients: dict[str, np.ndarray[Any, Any]]
    saved: int
    passes: list[float]
    losses: float
    evaluation: dict[str, float]


class _Held:
    """A tensor that autograd keeps; its storage counts as long as it is kept."""

    def __init__(self, tensor: torch.Tensor, live: dict[int, torch.UntypedStorage]) -> None:
        self.tensor, self._live = tensor, live
        live[id(self)] = tensor.untyped_storage()

    def __del__(self) -> None:
        del self._live[id(self)]


class _Saved:
    """Follows what autograd keeps for the backward pass, the parameters apart."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._live: dict[int, torch.UntypedStorage] = {}
        self.most = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor, self._live)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in self._live.values()}
        self.most = max(self.most, sum(size for at, size in sizes.items() if at not in self._parameters))
        return held


def _step(recipe: Path, family: str, layout: Layout, way: str | None) -> Step:
    from megatron_kd.training.distill import Distillation
    from megatron_kd.training.evaluate import evaluate_model

    student = yaml.safe_dump(MODELS[family].model_dump(mode="json"), default_flow_style=True, width=10**6)
    overrides = [f"student.model={student}", "student.from_teacher=null"]
    trainer = Trainer(recipe_in(recipe, layout, *overrides, *([f"training={{{WAYS[way]}}}"] if way else [])))
    module, session = trainer.student.model.module, trainer.session
    passes, losses = [0] * len(module.decoder.layers), 0
    for i, layer in enumerate(module.decoder.layers):
        layer.register_forward_hook(lambda *_, i=i: passes.__setitem__(i, passes[i] + 1))
    loss = Distillation.__call__

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        return loss(*args, **kwargs)

    saved = _Saved(module)
    with pytest.MonkeyPatch.context() as patch, saved.hooks():
        patch.setattr(Distillation, "__call__", counted)
        metrics = trainer.step()
    micro_batches = trainer.recipe.num_microbatches
    per_micro_batch = [count / micro_batches for count in passes]
    evaluation = evaluate_model(
        module, session.evaluation, session.samples, session.evaluation_cached, session.groups, 1
    )
    return Step(
        metrics,
        trainer.gradients(),
        saved.most,
        per_micro_batch,
        losses / micro_batches,
        evaluation,
    )


def _rank(rank: int, world: int, recipe: Path) -> dict[Any, Step]:
    if world == 1:
        make_inputs(recipe_in(recipe, ALONE), masked=True)
    cases = [case for case in CASES if case[1].world == world]
    plain = {(family, layout, None) for family, layout, _ in cases}
    return {case: _step(recipe, *case) for case in sorted({*cases, *plain}, key=str)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Step]]:
    """What each rank reports, by case; with the way None nothing is computed again."""
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("recompute"),
        data={"train_tokens": 48 * 8, "heldout_tokens": 48 * 2},
        optimizer={"lr_warmup_iters": 0},
    )
    found: dict[Any, list[Step]] = {}
    for world in (1, 4):
        ranks: list[dict[Any, Step]] = run_distributed(_rank, world, recipe, timeout_s=300.0)
        found |= {case: [rank[case] for rank in ranks] for case in ranks[0]}
    return found


def _name(value: object) -> str:
    return str(value)


@pytest.mark.parametrize(("family", "layout", "way"), CASES, ids=_name)
def test_a_step_is_that_without_recomputation(
    steps: dict[Any, list[Step]], family: str, layout: Layout, way: str
) -> None:
    for ours, theirs in zip(steps[family, layout, way], steps[family, layout, None], strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
        assert ours.evaluation == pytest.approx(theirs.evaluation, rel=1e-5)
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in ours.gradients.items():
            scale = np.abs(theirs.gradients[name]).max()
            assert np.abs(gradient - theirs.gradients[name]).max() <= 1e-6 * scale, name


@pytest.mark.parametrize(("family", "layout", "way"), CASES, ids=_name)
def test_layers_are_computed_again_and_the_loss_is_not(
    steps: dict[Any, list[Step]], family: str, layout: Layout, way: str
) -> None:
    for ours, theirs in zip(steps[family, layout, way], steps[family, layout, None], strict=True):
        again = {"full": [2.0] * len(theirs.passes), "block": [2.0, 2.0, 1.0, 1.0]}.get(way, [1.0] * len(theirs.passes))
        assert set(theirs.passes) == {1.0} and ours.passes == again
        assert ours.losses == theirs.losses
    # The last stage alone has the loss.
    assert {step.losses for step in steps[family, layout, way]} == ({0.0, 1.0} if layout.pp > 1 else {1.0})


@pytest.mark.parametrize(("family", "layout", "way"), CASES, ids=_name)
def test_less_is_kept(steps: dict[Any, list[Step]], family: str, layout: Layout, way: str) -> None:
    for ours, theirs in zip(steps[family, layout, way], steps[family, layout, None], strict=True):
        assert ours.saved < theirs.saved
