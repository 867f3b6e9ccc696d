"""The optimizer of the CPU against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.device.group_step_adam import GroupStepAdamW

SHAPES = ((7, 5), (5,), (3, 2, 4))
STEPS = 10


def _parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def _run(optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> list[Tensor]:
    """Parameters after steps with changing learning rates; the second one has no gradient at first."""
    parameters = _parameters()
    groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = optimizer_class(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, **settings)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(4)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3 - 1)
        optimizer.step()
    return parameters


@pytest.mark.parametrize(("adam_w_mode", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_ten_steps_are_those_of_torch(adam_w_mode: bool, theirs: type[torch.optim.Optimizer]) -> None:
    for ours, reference in zip(_run(GroupStepAdamW, adam_w_mode=adam_w_mode), _run(theirs), strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-6, atol=2e-7)


def test_the_two_modes_differ() -> None:
    coupled, decoupled = _run(GroupStepAdamW, adam_w_mode=False), _run(GroupStepAdamW, adam_w_mode=True)
    assert not torch.allclose(coupled[0], decoupled[0], rtol=1e-4)
    torch.testing.assert_close(coupled[1], decoupled[1])  # no decay in its group


def test_state_moves_to_another_optimizer() -> None:
    """Five steps, the state handed over, five more: the bits of ten steps."""

    def steps(optimizer: GroupStepAdamW, parameter: Tensor, which: range) -> None:
        for step in which:
            parameter.grad = torch.full_like(parameter, float(step + 1)).cumsum(0)
            optimizer.step()

    straight = torch.linspace(-1, 1, 6).requires_grad_()
    steps(GroupStepAdamW([straight], lr=0.1), straight, range(10))
    first = torch.linspace(-1, 1, 6).requires_grad_()
    before = GroupStepAdamW([first], lr=0.1)
    steps(before, first, range(5))
    second = first.detach().clone().requires_grad_()
    after = GroupStepAdamW([second], lr=0.1)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["step"] == 5
    steps(after, second, range(5, 10))
    assert torch.equal(second, straight)


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="capturable"):
        GroupStepAdamW(_parameters(), capturable=True)
