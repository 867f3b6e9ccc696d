"""Choices by magnitude: constructed examples, and the formulas in float64 by loops."""

from __future__ import annotations

import torch

from megatron_kd.models.cut_scores import ffn_row_scores, largest, query_group_scores


def test_rows_are_scored_by_the_product_of_their_three_norms() -> None:
    """Gate, up and down of four rows; each has one loud matrix, and one row is loud in none but large in product."""
    gate = torch.tensor([[9.0, 0, 0], [0, 1, 0], [0, 0, 1], [2, 2, 1]])  # norms 9, 1, 1, 3
    up = torch.tensor([[1.0, 0, 0], [0, 8, 0], [1, 0, 0], [0, 3, 4]])  # 1, 8, 1, 5
    down = torch.tensor([[1.0, 0, 7, 0], [0, 1, 0, 2], [0, 0, 0, 0]])  # 1, 1, 7, 2
    scores = ffn_row_scores(torch.stack((gate, up)), down)
    assert scores.tolist() == [9.0, 8.0, 7.0, 30.0]
    assert largest(scores, 2) == [0, 3]
    # With an offset of 1 a row passes its gate on even where up is silent: √(1 + up²) instead of up.
    silent = torch.stack((gate, torch.zeros_like(up)))
    assert ffn_row_scores(silent, down).tolist() == [0.0] * 4
    assert ffn_row_scores(silent, down, 1.0).tolist() == [9.0, 1.0, 7.0, 6.0]


def test_groups_are_scored_by_what_their_heads_write() -> None:
    generator = torch.Generator().manual_seed(3)
    groups, heads, d, hidden = 3, 2, 4, 10
    qkv = torch.randn(groups * (heads + 2) * d, hidden, generator=generator)
    projection = torch.randn(hidden, groups * heads * d, generator=generator)
    expected = []
    for g in range(groups):
        value = qkv.double()[(g * (heads + 2) + heads + 1) * d :][:d]
        columns = [projection.double()[:, (g * heads + r) * d :][:, :d] for r in range(heads)]
        expected.append(sum(float((column @ value).square().sum()) for column in columns))
    scores = query_group_scores(qkv, projection, groups, d)
    assert torch.allclose(scores.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)
    # Queries and keys say where a head looks, not how much it writes.
    louder = qkv.clone().view(groups, heads + 2, d, hidden)
    louder[:, :-1] *= 100
    assert torch.equal(query_group_scores(louder.view_as(qkv), projection, groups, d), scores)


def test_of_equal_scores_the_first_are_kept() -> None:
    assert largest(torch.zeros(100), 3) == [0, 1, 2]
    assert largest([1.0, 2.0, 2.0, 0.5, 2.0], 2) == [1, 2]
    assert largest([1.0, 2.0], 2) == [0, 1]
