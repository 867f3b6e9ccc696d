"""The local attention against one written out in float64: windows, sinks, groups, documents, in blocks or at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.models import attention
from megatron_kd.models.attention import attend

Tensor = torch.Tensor


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    documents: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query after another: [b, n, q, d]."""
    b, n, q, d = query.shape
    heads = n // key.shape[1]
    rows = []
    for i in range(b):
        for h in range(n):
            for j in range(q):
                at = first + j
                seen = [
                    k
                    for k in range(at + 1)
                    if (window is None or at - k < window)
                    and (documents is None or documents[i, k] == documents[i, at])
                ]
                scores = key[i, h // heads, seen] @ query[i, h, j] / math.sqrt(d)
                weights = scores.exp()
                total = weights.sum() + (0.0 if sinks is None else sinks[h].exp())
                rows.append((weights / total) @ value[i, h // heads, seen])
    return torch.stack(rows).view(b, n, q, d)


@settings(max_examples=60, deadline=None)
@given(
    s=st.integers(1, 23),
    groups=st.integers(1, 2),
    repeat=st.integers(1, 3),
    window=st.none() | st.integers(1, 9),
    with_sinks=st.booleans(),
    with_documents=st.booleans(),
    cut=st.floats(0, 0.9),
    block=st.sampled_from([1, 4, 512]),
    seed=st.integers(0, 2**20),
)
def test_attention_is_the_written_out_one(
    s: int,
    groups: int,
    repeat: int,
    window: int | None,
    with_sinks: bool,
    with_documents: bool,
    cut: float,
    block: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    first = int(cut * s)
    query, sinks = random(2, groups * repeat, s - first, 4), random(groups * repeat) if with_sinks else None
    key, value = random(2, groups, s, 4), random(2, groups, s, 4)
    documents = torch.randint(0, 2, (2, s), generator=generator).cumsum(1) if with_documents else None
    before, attention.BLOCK = attention.BLOCK, block
    try:
        ours = attend(query, key, value, first, documents, window, sinks, 0.5)
    finally:
        attention.BLOCK = before
    theirs = oracle(query, key, value, first, documents, window, sinks)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    inputs = [query, key, value, *([sinks] if sinks is not None else [])]
    weights = torch.randn(theirs.shape, dtype=torch.float64, generator=generator)
    ours_grad, theirs_grad = (torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, theirs))
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [None, 128])
def test_scores_of_few_queries_are_held_at_once(window: int | None) -> None:
    """With 64 queries a block the largest tensor is [1, 2, 64, keys seen], not [1, 2, 1024, 1024]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.most = max(self.most, out.numel())
            return out

    q, k = torch.randn(1, 2, 1024, 8), torch.randn(1, 1, 1024, 8)
    before, attention.BLOCK = attention.BLOCK, 64
    try:
        with torch.no_grad(), Largest() as seen:
            attend(q, k, k, 0, None, window, torch.zeros(2), 1.0)
    finally:
        attention.BLOCK = before
    keys = 1024 if window is None else window + 63
    assert seen.most <= 2 * 64 * (keys + 1)
