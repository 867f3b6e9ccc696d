"""What is handed to Transformer Engine for packed documents, against the local attention. Not Transformer Engine."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.models import te_attention
from megatron_kd.models.attention import attend
from megatron_kd.models.te_attention import document_attention, segments_of

S, B, N, G, D = 16, 2, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 10, [0] * 9 + [1] * 7], dtype=torch.int32)


class Base:
    """Attention of thd tensors by their bounds, with the interface of Megatron-Core's ``TEDotProductAttention``."""

    def __init__(self, *, pg_collection: Any = None) -> None:
        self.masks: list[str] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert attention_mask is None and packed_seq_params is not None
        packed = packed_seq_params
        self.masks.append(attn_mask_type.name)
        assert (packed.qkv_format, packed.local_cp_size) == ("thd", 1)
        bounds = [pairwise(cu.tolist()) for cu in (packed.cu_seqlens_q, packed.cu_seqlens_kv)]
        out = []
        for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
            assert 0 < q1 - q0 <= packed.max_seqlen_q and q1 - q0 <= k1 - k0 <= packed.max_seqlen_kv
            assert attn_mask_type.name.endswith("bottom_right") or q1 - q0 == k1 - k0
            q, k, v = (t.transpose(0, 1)[None] for t in (query[q0:q1], key[k0:k1], value[k0:k1]))
            out.append(attend(q, k, v, k1 - k0 - (q1 - q0), None, None, None, 0.3)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_documents_are_attended_as_by_the_local_attention(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(S, B, N, D, generator=generator)
    key, value = torch.randn(2, S, B, G, D, generator=generator)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    expected = attend(q, k, v, 0, DOCUMENTS, None, None, 0.3).permute(2, 0, 1, 3).reshape(S, B, N * D)
    monkeypatch.setattr(te_attention, "gather_sequence", lambda local, group: local)  # whole already
    for rank in range(size):
        at = ContextSlice(rank, size).positions(S)
        cp = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        attention = document_attention(Base)(pg_collection=SimpleNamespace(cp=cp))
        got = attention.forward(query[at], key, value, DOCUMENTS, None)
        torch.testing.assert_close(got, expected[at])
        assert attention.masks == ["padding_causal" if size == 1 else "padding_causal_bottom_right"]


def test_bounds_by_hand() -> None:
    whole = segments_of(DOCUMENTS)
    assert whole.queries.tolist() == whole.keys.tolist() == [0, 5, 6, 16, 25, 32] and whole.taken is None
    assert (whole.queries.dtype, whole.longest_query) == (torch.int32, 10)
    first = segments_of(DOCUMENTS[:1], ContextSlice(0, 2))  # positions 0 … 3 and 12 … 15
    assert first.queries.tolist() == [0, 4, 8] and first.keys.tolist() == [0, 4, 14]
    assert first.taken is not None and first.taken.tolist() == [0, 1, 2, 3, *range(6, 16)]
    assert (first.longest_query, first.longest_keys) == (4, 10)


def test_two_ways_of_saying_documents_are_refused() -> None:
    tensors = torch.zeros(S, B, N, D), torch.zeros(S, B, G, D), torch.zeros(S, B, G, D)
    with pytest.raises(ValueError, match="documents come as attention_mask"):
        document_attention(Base)().forward(*tensors, DOCUMENTS, None, packed_seq_params=PackedSeqParams())
