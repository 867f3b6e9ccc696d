"""Weights in the host's memory: there for a pass, gone after it, the same bits. The pass of a real model is in
tests/distributed/test_teacher_layouts.py, the copies of a GPU in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_kd.teacher.offload import HostWeights


class Model(torch.nn.Module):
    """An embedding, layers and a head, named as Megatron-Core names them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(3, 5)
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5).bfloat16()])
        self.output_layer = torch.nn.Linear(5, 7, bias=False)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.decoder.layers
        logits: torch.Tensor = self.output_layer(second(first(self.embedding(x)).bfloat16()).float())
        return logits


def sizes(model: Any) -> dict[str, int]:
    return {name: parameter.untyped_storage().nbytes() for name, parameter in model.named_parameters()}


def test_weights_are_there_for_a_pass_alone() -> None:
    model, x = Model(), torch.randn(2, 3)
    before, full = model(x), sizes(model)
    weights = HostWeights(model, stay=[model.output_layer.weight])
    assert weights.bytes == sum(full.values()) - full["output_layer.weight"]
    for _ in range(2):
        assert [name for name, size in sizes(model).items() if size] == ["output_layer.weight"]
        with weights.on_device():
            assert sizes(model) == full
            assert torch.equal(model(x), before)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model = Model()
    weights = HostWeights(model)
    with pytest.raises(RuntimeError, match="shapes"), weights.on_device():
        model(torch.randn(2, 4))
    assert not any(sizes(model).values())


def test_a_view_of_something_larger_gets_memory_of_its_own() -> None:
    model = Model()
    together = torch.randn(4, 5, 3)
    model.embedding.weight.data = together[1]
    kept = together.clone()
    weights = HostWeights(model)
    assert torch.equal(together, kept)
    with weights.on_device():
        assert torch.equal(model.embedding.weight, kept[1])


def test_what_is_empty_already_stays_so() -> None:
    model = Model()
    model.output_layer.weight.untyped_storage().resize_(0)
    weights = HostWeights(model)
    with weights.on_device():
        assert sizes(model)["output_layer.weight"] == 0 < sizes(model)["embedding.weight"]
