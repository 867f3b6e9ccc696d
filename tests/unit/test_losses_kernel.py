"""The row kernel by itself: two shards of one vocabulary in one process, the exchange done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_kd.losses.arguments import LossArguments, check_arguments
from megatron_kd.losses.divergences import make_divergence
from megatron_kd.losses.kernels import RowBatch, VocabRange
from megatron_kd.losses.topk_kernel import TopKKernel
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import COMBINATIONS, oracle_row


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


@pytest.mark.parametrize(("divergence", "tail"), COMBINATIONS)
@pytest.mark.parametrize("way", ["shards", "gradient", "slices"])
@pytest.mark.parametrize("shift", [0.0, -150.0, 80.0])
def test_a_shard_that_holds_nothing_but_cached_ids(shift: float, way: str, divergence: str, tail: str) -> None:
    """Its own tail is empty, and the other shard's lies where float32's exp has long over- or underflowed."""
    logits = torch.tensor([[3.0, -1.0, 0.5, 2.0, -140.0, -141.0, -139.0, -150.0]]) + shift
    ids, logprobs = torch.arange(4, dtype=torch.int32)[None], torch.tensor([[0.4, 0.1, 0.2, 0.2]]).log()
    targets = TopKTargets(ids, logprobs, torch.tensor([0.1]).log(), 1.0)
    exact = logits.double().requires_grad_()
    expected = oracle_row(
        exact[0], [0, 1, 2, 3], logprobs[0].double().tolist(), float(targets.tail_logmass), tail, divergence
    )
    expected.backward()

    weights = torch.ones(1)
    batch = RowBatch(torch.zeros(1, dtype=torch.int64), weights, None)
    ranges = [VocabRange(start, 4) for start in (0, 4)]
    formula = make_divergence(divergence, 0.5)
    kernels = [TopKKernel(shard(part.start, torch.float32), targets, formula, tail) for part in ranges]
    parts = [logits[:, :4].clone(), logits[:, 4:].clone()]
    rows = [kernel.prepare(batch) for kernel in kernels]
    works = [
        kernel.begin(part, None, row, where)
        for kernel, part, row, where in zip(kernels, parts, rows, ranges, strict=True)
    ]
    if way == "slices":
        merged = kernels[0].merge([kernels[0].merge(works[:1]), works[1]])
        second = kernels[0].combine(merged, merged.packed[None])
        values = [kernels[0].finish(merged, None if second is None else second[None], None)]
    else:
        gathered = torch.stack([work.packed for work in works])
        seconds = [kernel.combine(work, gathered) for kernel, work in zip(kernels, works, strict=True)]
        assert (seconds[0] is not None) == (divergence in ("jsd", "tvd"))
        other = None if seconds[0] is None else torch.stack([s for s in seconds if s is not None])
        values = [kernel.finish(work, other, weights) for kernel, work in zip(kernels, works, strict=True)]
        assert torch.equal(values[0].saved, values[1].saved)
    if way != "shards":
        parts = [logits[:, :4].clone(), logits[:, 4:].clone()]
        for kernel, part, row, where in zip(kernels, parts, rows, ranges, strict=True):
            kernel.gradient(part, None, row, where, values[0].saved, weights)

    loss = sum(value.figures[0] for value in values) + values[0].figures[1]
    assert isinstance(loss, torch.Tensor)
    # Float32 logits of 150 and more are 1.5e-5 apart.
    torch.testing.assert_close(loss[0].double(), expected.detach(), rtol=2e-6, atol=1.5e-5)
    assert exact.grad is not None
    torch.testing.assert_close(torch.cat(parts, dim=1).double(), exact.grad, rtol=1e-4, atol=1e-5)
