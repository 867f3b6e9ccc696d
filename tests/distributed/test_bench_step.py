"""``bench step``: both of its sides do the work they are said to do, and the report holds together."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron_kd.testing import run_distributed
from tests.assets import ROOT

RECIPE = ROOT / "recipes/bench_step.yaml"
SMALL = ["data.seq_length=32", "teacher.model.vocab_size=1024", "teacher.top_k=20", "optimizer.clip_grad=0"]
QWEN3 = ["teacher.model.family=qwen3", "teacher.model.window_size=null", "teacher.model.rope_scaling=null"]
QWEN3 += ["teacher.model.num_moe_experts=null", "teacher.model.moe_router_topk=null"]
QWEN3 += ["teacher.model.window_attn_skip_freq=null"]
MODELS = {"gpt_oss": [], "qwen3": QWEN3}
METHODS = ["fused", "forward_chunked", "dense"]


def _gradients(passes: Any) -> dict[str, Any]:
    module = passes.student.model.module
    return {name: p.main_grad.detach().double().numpy().copy() for name, p in module.named_parameters()}


def _counts(overrides: list[str]) -> dict[str, Any]:
    """By method (operations counted, operations we say) of a step; gradients of the plain one and of w = 1."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_kd.bench.measure import count_flops
    from megatron_kd.bench.step_passes import PLAIN, StepPasses
    from megatron_kd.config import load_recipe
    from megatron_kd.models.flops import mean_context
    from megatron_kd.models.step_flops import step_flops
    from tests.training_runs import leave_layout

    leave_layout()
    recipe = load_recipe(
        RECIPE, [*SMALL, *overrides, "loss.ce_weight=1.0", "optimizer.lr=1e-30", "optimizer.min_lr=0.0"]
    )
    model, passes = recipe.student.model, StepPasses(recipe)
    found: dict[str, Any] = {}
    positions, length = recipe.training.global_batch_size * recipe.data.seq_length, recipe.data.seq_length
    # The local attention multiplies whole squares, and the router is not counted.
    q = model.num_attention_heads * model.kv_channels
    extra = sum(4 * q * (length - mean_context(length, window)) for window in model.layer_windows())
    extra += model.num_layers * 2 * model.hidden_size * (model.num_moe_experts or 0)
    for name in (PLAIN, *METHODS):
        with sdpa_kernel(SDPBackend.MATH):
            counted = count_flops(partial(passes.step, name))
        flops = step_flops(StepPasses.offline(recipe, name) if name != PLAIN else recipe)
        ours = (flops.student if name == PLAIN else flops.executed) + 3 * positions * extra
        found[name] = (counted, ours)
        if name in (PLAIN, "fused"):
            found[f"gradients of {name}"] = _gradients(passes)
    return found


def _rank(rank: int, world: int) -> dict[str, Any]:
    from megatron_kd.bench.step import bench_step
    from megatron_kd.errors import ConfigError

    found: dict[str, Any] = {name: _counts(overrides) for name, overrides in MODELS.items()}
    with pytest.raises(ConfigError) as refused:
        bench_step(RECIPE, methods=["fusd"], show_progress=False)
    return {**found, "refused": str(refused.value)}


def _pair(rank: int, world: int) -> Any:
    from megatron_kd.bench.step import bench_step

    pair = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"]
    pair += ["training.micro_batch_size=1"]
    report = bench_step(RECIPE, [*SMALL, *pair], methods=METHODS, rounds=2, threads=1, show_progress=False)
    return report.to_json(), report.text()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_distributed(_rank, 1)[0]


@pytest.mark.parametrize("model", MODELS)
def test_operations_are_those_that_torch_counts(model: str, found: dict[str, Any]) -> None:
    for name in ("cross_entropy", *METHODS):
        counted, ours = found[model][name]
        assert counted == pytest.approx(ours, rel=1e-12), name


@pytest.mark.parametrize("model", MODELS)
def test_plain_cross_entropy_has_the_gradient_of_a_loss_that_is_all_cross_entropy(
    model: str, found: dict[str, Any]
) -> None:
    plain, fused = (found[model][f"gradients of {name}"] for name in ("cross_entropy", "fused"))
    assert plain.keys() == fused.keys()
    for name, gradient in plain.items():
        assert np.linalg.norm(gradient) > 0
        assert np.linalg.norm(gradient - fused[name]) < 1e-4 * np.linalg.norm(gradient), name


def test_the_report_on_two_ranks() -> None:
    (report, text), _ = run_distributed(_pair, 2)
    assert [row["method"] for row in report["results"]] == ["cross_entropy", *METHODS]
    assert report["setting"]["ranks"] == 2 and report["setting"]["micro_batches"] == 2
    for row in report["results"]:
        low, high = row["ratio_spread"]
        assert low <= row["ratio"] <= high
        assert 0 < row["forward_backward_s"] < row["step_s"] and row["peak_gib"] > 0.1
        assert row["method"] in text
    assert report["results"][0]["ratio"] == report["results"][0]["cpu_ratio"] == 1


def test_an_unknown_method_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("--methods names 'fusd': choose among ")
