"""An offloaded teacher on one GPU: its memory is given back between passes, and nothing else changes. Needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.assets import megatron_kd, steps_of, succeed, tiny_recipe


class Model(torch.nn.Module):
    """One large layer, named as Megatron-Core names layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.to("cuda", torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:
            x = layer(x)
        return x


def test_weights_leave_the_device_and_come_back() -> None:
    from megatron_kd.device import select_device
    from megatron_kd.teacher.offload import HostWeights

    select_device("h200")
    model, x = Model(4096), torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    before, resident = model(x), torch.cuda.memory_allocated()
    weights = HostWeights(model)
    assert weights.bytes == 4 * 2 * 4096**2
    assert all(home.is_pinned() for home in weights._homes.values())
    for _ in range(3):
        assert torch.cuda.memory_allocated() <= resident - weights.bytes
        with weights.on_device():
            assert torch.equal(model(x), before)
        # What was given back is used by others at once, behind the pass that is still running.
        torch.empty(weights.bytes, dtype=torch.uint8, device="cuda").fill_(255)


def test_an_offloaded_teacher_trains_the_same(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200"},
        teacher={"mode": "online", "cache": None},
        training={"train_iters": 2, "precision": "bf16"},
        optimizer={"lr_warmup_iters": 1},
        checkpoint={"save_interval": 2},
    )
    succeed(megatron_kd("convert", "import", recipe))
    succeed(megatron_kd("prepare", recipe))
    losses = []
    for offload in ("false", "true"):
        run = tmp_path / offload
        succeed(megatron_kd("train", recipe, f"teacher.offload={offload}", f"run_dir={run}"))
        losses.append([step["loss/kd"] for step in steps_of(run)])
    assert losses[0] == losses[1] and len(losses[0]) == 2
