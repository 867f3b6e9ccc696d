"""The hot path never asks the device for a number: with tensors that hold none, every such question is an error.

``meta`` tensors have shapes alone, so reading a value (``item``, ``bool``, ``nonzero``, a boolean mask as an index)
raises. This is what would make the host wait for a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_kd.losses import IMPLEMENTATIONS, passes
from megatron_kd.losses.eager_passes import EagerPasses
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import ALL_METHODS, DIVERGENCES, tiles

N, D, V, K = 300, 8, 64, 5


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton kernel cannot be launched without data, and autocast does not know the device."""
    monkeypatch.setattr(passes, "passes_for", lambda device: EagerPasses())
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


@pytest.mark.parametrize("weights_device", ["meta", "cpu"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_no_value_is_read(name: str, mode: str, kind: str, divergence: str, weights_device: str) -> None:
    def empty(*shape: int, **kw: Any) -> torch.Tensor:
        return torch.empty(shape, device="meta", **kw)

    hidden = empty(N, D, dtype=torch.bfloat16, requires_grad=True)
    weight = empty(V + 3, D, dtype=torch.bfloat16, requires_grad=True)
    token_weights = torch.ones(N, device=weights_device)
    if weights_device == "cpu":
        token_weights[::3] = 0
    kw: dict[str, Any] = {
        "labels": torch.zeros(N, dtype=torch.int64, device=weights_device), "ce_weight": 0.1, "vocab_size": V,
        "divergence": divergence, "mode": mode, "chunk_bytes": 4 * V * 128,
    }  # fmt: skip
    call = IMPLEMENTATIONS[name]

    def run() -> None:
        if kind == "topk":
            targets = TopKTargets(empty(N, K, dtype=torch.int32), empty(N, K), empty(N))
            out = call.topk(hidden, weight, targets, token_weights, **kw)
        else:
            out = call.full(hidden, weight, empty(N, D), empty(V, D), token_weights, **kw)
        out.loss.backward()

    if mode == "tiles":
        kw["mode"] = "recompute"
        with tiles():
            run()
    else:
        run()
    assert hidden.grad is not None and weight.grad is not None


def test_reading_a_value_would_be_an_error() -> None:
    for read in (lambda x: x.item(), lambda x: bool(x), lambda x: x.nonzero(), lambda x: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.empty(1, device="meta"))
