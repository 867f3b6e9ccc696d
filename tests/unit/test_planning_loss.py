"""The planned workspace of the losses against bytes counted while they run."""

from __future__ import annotations

import pytest
import torch

from megatron_kd.losses import IMPLEMENTATIONS, peak_extra_bytes
from megatron_kd.planning.loss_workspace import LossShape, loss_workspace
from megatron_kd.targets import TopKTargets

N, D, V, K, CHUNK_MIB = 512, 192, 4096, 40, 3.0


def counted(name: str, mode: str, full: bool, dtype: torch.dtype) -> int:
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    logprobs, ids = torch.log_softmax(torch.randn(N, V), dim=1).topk(K)
    targets = TopKTargets(ids.int(), logprobs.half(), torch.log1p(-logprobs.exp().sum(dim=1)), 1.0)
    teacher_hidden, teacher_weight = torch.randn(N, D + 16, dtype=dtype), torch.randn(V, D + 16, dtype=dtype)
    weights = torch.ones(N)

    def step() -> None:
        method, chunk = IMPLEMENTATIONS[name], int(CHUNK_MIB * 2**20)
        if full:
            out = method.full(
                hidden, weight, teacher_hidden, teacher_weight, weights, vocab_size=V, mode=mode, chunk_bytes=chunk
            )
        else:
            out = method.topk(hidden, weight, targets, weights, vocab_size=V, mode=mode, chunk_bytes=chunk)
        out.loss.backward()

    return peak_extra_bytes(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("full", [False, True], ids=["top_k", "full"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("fused", "single_pass"), ("fused", "recompute"), ("forward_chunked", "auto"), ("dense", "auto")],
)
def test_the_workspace_is_what_is_allocated(name: str, mode: str, full: bool, dtype: torch.dtype) -> None:
    shape = LossShape(
        tokens=N,
        local_tokens=N,
        hidden=D,
        vocab=V,
        tp=1,
        sequence_parallel=False,
        top_k=K,
        teacher_hidden=D + 16 if full else None,
        itemsize=dtype.itemsize,
        on_cpu=True,
    )
    planned = loss_workspace(shape, name, mode, CHUNK_MIB).peak
    assert planned == pytest.approx(counted(name, mode, full, dtype), rel=0.05)


def test_a_chunk_bounds_the_fused_loss_and_tokens_the_others() -> None:
    def peak(name: str, tokens: int) -> float:
        shape = LossShape(tokens, tokens, 4096, 128256, 1, False, 100, None, 2, on_cpu=False)
        return loss_workspace(shape, name, "single_pass", 1024.0).peak

    more = 98304
    logits = more * 128256 * 4
    assert peak("fused", 131072) - peak("fused", 32768) < 0.02 * logits
    assert peak("forward_chunked", 131072) - peak("forward_chunked", 32768) == pytest.approx(logits, rel=0.05)
    assert peak("dense", 131072) - peak("dense", 32768) > 6 * logits
