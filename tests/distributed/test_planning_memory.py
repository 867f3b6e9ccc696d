"""Planned parameters, weights, gradients and optimizer against the bytes that Megatron-Core really holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_kd.config import Recipe, load_model
from megatron_kd.planning.layout import Layout as PlannedLayout
from megatron_kd.planning.memory import moments
from megatron_kd.planning.parameters import rank_parameters
from megatron_kd.testing import run_distributed
from tests.assets import ROOT
from tests.training_runs import Layout, leave_layout

CASES = [
    ("tiny_gpt_oss", "bf16", Layout(1)),
    ("tiny_llama", "fp32", Layout(1)),
    ("tiny_gpt_oss", "bf16", Layout(2, tp=2, sp=True)),
    ("tiny_gpt_oss", "bf16", Layout(2, ep=2)),
    ("tiny_gpt_oss", "fp32", Layout(2, pp=2)),
    ("tiny_gpt_oss", "bf16", Layout(2)),
    ("tiny_llama", "bf16", Layout(2, tp=2, sp=True)),
    ("tiny_llama", "bf16", Layout(2, pp=2)),
    ("tiny_gpt_oss", "bf16", Layout(2, pp=2, vp=2)),
    ("tied_llama", "fp32", Layout(2, pp=2, vp=2)),
    ("tiny_llama", "bf16", Layout(2)),
    ("tiny_gpt_oss", "bf16", Layout(4, tp=2, sp=True, ep=2)),
    ("tiny_gpt_oss", "bf16", Layout(4, pp=2, ep=2)),
    ("tiny_llama", "bf16", Layout(4, tp=2, sp=True, pp=2)),
    ("tied_llama", "bf16", Layout(4, pp=2)),
]


@dataclass(frozen=True)
class Held:
    """Of one rank: its stage, numbers of parameters, and bytes."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int


def recipe_of(name: str, precision: str, layout: Layout) -> Recipe:
    model = load_model(name.replace("tied", "tiny"), ROOT)
    if name.startswith("tied"):
        model = model.model_copy(update={"untie_embeddings_and_output_weights": False})
    return Recipe.model_validate(
        {
            "name": "held",
            "cluster": {"gpus_per_node": layout.world, "gpu": "cpu"},
            "data": {"samples": "samples", "seq_length": 48},
            "teacher": {"mode": "offline", "model": model.model_dump(), "cache": "cache", "top_k": 20},
            "student": {"model": model.model_dump()},
            "parallelism": {
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
                "expert_model_parallel_size": layout.ep,
                "sequence_parallel": layout.sp,
            },
            "training": {"global_batch_size": 8, "train_iters": 10, "precision": precision},
            "optimizer": {"lr": 1e-3},
        }
    )


def _rank(rank: int, world: int) -> list[Held]:
    return [_held(recipe_of(*case)) for case in CASES if case[2].world == world]


def _held(recipe: Recipe) -> Held:
    from megatron_kd.device import select_device
    from megatron_kd.models.parallel import init_model_parallel
    from megatron_kd.training.setup import build_student, wrap_for_training

    select_device("cpu")
    groups = init_model_parallel(recipe.parallelism, seed=1)
    student = wrap_for_training(recipe, groups, build_student(recipe, groups))
    buffers = [buffer for chunk in student.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in buffers:
        buffer.grad_data.fill_(1e-3)
    student.optimizer.step()
    held = Held(
        stage=groups.pp_rank,
        parameters=sum(parameter.numel() for parameter in student.wrapped.parameters()),
        weights=sum(_bytes(buffer.param_data) for buffer in buffers),
        gradients=sum(_bytes(buffer.grad_data) for buffer in buffers),
        optimizer=sum(_optimizer_bytes(part) for part in student.optimizer.chained_optimizers),
    )
    leave_layout()
    return held


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_bytes(part: Any) -> int:
    """Adam's moments, and the float32 copies of 16-bit weights: tensors of their own, no views of the weights."""
    state = sum(
        _bytes(value)
        for values in part.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    copies = [tensor for group in part.shard_fp32_from_float16_groups for tensor in group if tensor is not None]
    return state + sum(map(_bytes, copies))


@pytest.fixture(scope="module")
def held() -> dict[int, list[list[Held]]]:
    """By the number of ranks, of each rank what it holds in each of the cases."""
    return {world: run_distributed(_rank, world, timeout_s=300.0) for world in (1, 2, 4)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_every_rank_holds_what_is_planned(held: dict[int, list[list[Held]]], case: tuple[str, str, Layout]) -> None:
    recipe = recipe_of(*case)
    layout = PlannedLayout.of(recipe)
    number = [other for other in CASES if other[2].world == case[2].world].index(case)
    planned = {memory.stage: memory.parts for memory in moments(recipe) if memory.moment == "backward"}
    for rank in held[case[2].world]:
        found = rank[number]
        assert rank_parameters(recipe.student.model, layout, found.stage).total == found.parameters
        parts = planned[found.stage]
        assert parts["weights"] == pytest.approx(found.weights, rel=0.05)
        assert parts["optimizer"] == pytest.approx(found.optimizer, rel=0.05)
        # Beside the buffers the plan holds the largest gradient before it is added to its buffer.
        largest = rank_parameters(recipe.student.model, layout, found.stage).largest * layout.itemsize
        gradients = parts["gradients"] - (largest if layout.itemsize == 2 else 0)
        assert gradients == pytest.approx(found.gradients, rel=0.05)
