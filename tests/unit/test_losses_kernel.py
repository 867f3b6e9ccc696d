"""The row kernel by itself: two shards of one vocabulary in one process, the exchange done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_kd.losses.arguments import LossArguments, check_arguments
from megatron_kd.losses.kernels import RowBatch
from megatron_kd.losses.topk_kernel import TopKKernel
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import oracle_row


def shard(start: int, dtype: torch.dtype) -> LossArguments:
    """Four of eight ids, from ``start``."""
    whole = check_arguments(
        torch.zeros(1, 2, dtype=dtype),
        torch.zeros(8, 2, dtype=dtype),
        torch.ones(1),
        temperature=1.0,
        scale_by_t2=True,
        labels=None,
        ce_weight=0.0,
        vocab_size=8,
        vocab_start=0,
        logit_softcap=None,
        group=None,
        sequence_parallel=False,
    )
    return replace(whole, vocab_start=start, vocab_rows=4)


@pytest.mark.parametrize("way", ["finish", "gradient"])
@pytest.mark.parametrize("shift", [0.0, -150.0, 80.0])
def test_a_shard_that_holds_nothing_but_cached_ids(shift: float, way: str) -> None:
    """Its own tail is empty, and the other shard's lies where float32's exp has long over- or underflowed."""
    logits = torch.tensor([[3.0, -1.0, 0.5, 2.0, -140.0, -141.0, -139.0, -150.0]]) + shift
    ids, logprobs = torch.arange(4, dtype=torch.int32)[None], torch.tensor([[0.4, 0.1, 0.2, 0.2]]).log()
    targets = TopKTargets(ids, logprobs, torch.tensor([0.1]).log(), 1.0)
    exact = logits.double().requires_grad_()
    expected = oracle_row(exact[0], [0, 1, 2, 3], logprobs[0].double().tolist(), float(targets.tail_logmass), "bucket")
    expected.backward()

    weights = torch.ones(1)
    batch = RowBatch(torch.zeros(1, dtype=torch.int64), weights, None)
    kernels = [TopKKernel(shard(start, torch.float32), targets, "forward_kl", "bucket") for start in (0, 4)]
    parts = [logits[:, :4].clone(), logits[:, 4:].clone()]
    works = [kernel.begin(part, None, batch) for kernel, part in zip(kernels, parts, strict=True)]
    gathered = torch.stack([work.packed for work in works])
    values = [kernel.finish(work, gathered, weights) for kernel, work in zip(kernels, works, strict=True)]
    if way == "gradient":
        parts = [logits[:, :4].clone(), logits[:, 4:].clone()]
        for kernel, part, value in zip(kernels, parts, values, strict=True):
            kernel.gradient(part, None, batch, value.saved, weights)

    assert torch.equal(values[0].saved, values[1].saved)
    loss = values[0].figures[0] + values[1].figures[0] + values[0].figures[1]
    torch.testing.assert_close(loss[0].double(), expected.detach(), rtol=2e-6, atol=0)
    assert exact.grad is not None
    torch.testing.assert_close(torch.cat(parts, dim=1).double(), exact.grad, rtol=1e-4, atol=2e-6)
