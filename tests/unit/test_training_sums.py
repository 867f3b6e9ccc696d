"""Sums over tokens: means are the same however the tokens are dealt out, and masked tokens count for nothing."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_kd.data.batches import Batch
from megatron_kd.losses import DivergenceOutput, DivergenceStatistics
from megatron_kd.training.sums import FIELDS, TokenSums, means

CPU = torch.device("cpu")


def output_of(
    kd: torch.Tensor, ce: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor
) -> tuple[DivergenceOutput, Batch]:
    statistics = DivergenceStatistics(
        teacher_mass=torch.full_like(kd, 0.9),
        student_mass=torch.full_like(kd, 0.5),
        tail=torch.full_like(kd, 0.1),
        top1_agreement=torch.ones_like(kd),
        kd_per_token=kd,
        ce_per_token=ce,
    )
    loss = 0.7 * kd + 0.3 * ce
    batch = Batch((0,), torch.zeros(1, len(kd), dtype=torch.int64), labels, weights, None)
    return DivergenceOutput((loss * weights).sum(), loss, statistics), batch


def test_means_do_not_depend_on_how_tokens_are_dealt_out() -> None:
    generator = torch.Generator().manual_seed(0)
    kd, ce = torch.rand(12, generator=generator), torch.rand(12, generator=generator)
    weights = (torch.rand(12, generator=generator) > 0.3).float()
    labels = torch.where(torch.arange(12) % 4 == 0, -100, 5)
    ce = torch.where(labels >= 0, ce, 0.0)  # as the losses leave it
    expected: dict[str, float] = {}
    for cuts in ([12], [1, 11], [3, 4, 5], [2] * 6):
        parts, start = [], 0
        for size in cuts:
            part = slice(start, start + size)
            parts.append(TokenSums.of(*output_of(kd[part], ce[part], weights[part], labels[part]), 0.3).values)
            start += size
        result = means(TokenSums.reduce(parts, None, CPU))
        expected = expected or result
        assert result == pytest.approx(expected, rel=1e-12)
    valid = weights != 0
    assert expected["loss/kd"] == pytest.approx(kd[valid].double().mean().item(), rel=1e-6)
    assert expected["loss/ce"] == pytest.approx(
        ce[valid & (labels >= 0)].sum().item() / (valid & (labels >= 0)).sum().item(), rel=1e-6
    )
    assert expected["kd/top1_agreement"] == 1.0


def test_garbage_in_masked_tokens_is_not_counted() -> None:
    kd = torch.tensor([1.0, math.nan, 3.0, math.inf])
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0])
    labels = torch.tensor([1, -100, 2, -100])
    sums = TokenSums.reduce([TokenSums.of(*output_of(kd, kd, weights, labels), 0.5).values], None, CPU)
    assert sums["tokens"] == 2 and sums["labelled"] == 2
    assert means(sums)["loss/kd"] == 2.0


def test_a_fully_masked_batch_has_no_means() -> None:
    zeros = torch.zeros(3)
    sums = TokenSums.reduce([TokenSums.of(*output_of(zeros, zeros, zeros, zeros.long() - 100), 0.5).values], None, CPU)
    assert set(sums) == set(FIELDS) and means(sums) == {}
