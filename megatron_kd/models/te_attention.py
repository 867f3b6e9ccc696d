"""Transformer Engine's attention within packed documents: ``thd`` tensors and the bounds of documents. Not run here.

Between its layers Megatron-Core keeps rows as they are, [s, b, …]; only here they are laid out as the documents that
attention stays within. Under context parallelism keys and values are gathered, as the local attention does it: its own
exchanges want every document cut among the ranks, where ``ContextSlice`` cuts rows.

b rows, s positions of a row (sq of them on this rank), n heads and g key-value heads on this rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_kd.data.context_slice import WHOLE, ContextSlice
from megatron_kd.models.context_parallel import gather_sequence


class _BottomRight(Enum):
    """Transformer Engine's name of a mask that Megatron-Core's enumeration lacks: it asks for the name alone."""

    padding_causal_bottom_right = auto()


@dataclass(frozen=True)
class Segments:
    """Runs of queries of one document, and the keys that belong to them: from the document's beginning on.

    Attributes:
        queries: int32 [segments + 1], bounds in the queries of this rank, row by row.
        keys: int32 [segments + 1], bounds in what ``taken`` takes.
        taken: int64, places in the keys of whole rows, row by row; None: all as they stand.
        longest_query, longest_keys: the largest segment.
    """

    queries: Tensor
    keys: Tensor
    taken: Tensor | None
    longest_query: int
    longest_keys: int

    @property
    def packed(self) -> PackedSeqParams:
        """As Megatron-Core hands them on; ``local_cp_size`` turns Transformer Engine's own context parallelism off."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.queries,
            cu_seqlens_kv=self.keys,
            max_seqlen_q=self.longest_query,
            max_seqlen_kv=self.longest_keys,
            local_cp_size=1,
        )


def segments_of(documents: Tensor, context: ContextSlice = WHOLE) -> Segments:
    """The segments of this rank's queries, on the device of ``documents``.

    Bounds come to the host: a device sync in every layer, and again where layers are recomputed.

    Args:
        documents: integers [b, s], equal within a document and unlike in neighbouring ones.
    """
    length = documents.shape[1]
    queries, keys, taken = [0], [0], []
    for row, numbers in enumerate(documents.cpu()):
        starts = [0, *((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist(), length]
        for run in context.ranges(length):
            for start, stop in pairwise(starts):
                first, last = max(start, run.start), min(stop, run.stop)
                if first >= last:
                    continue
                queries.append(queries[-1] + last - first)
                keys.append(keys[-1] + last - start)
                taken.append(torch.arange(row * length + start, row * length + last))
    device = documents.device
    bounds = [torch.tensor(values, dtype=torch.int32) for values in (queries, keys)]
    return Segments(
        queries=bounds[0].to(device),
        keys=bounds[1].to(device),
        taken=None if context.size == 1 else torch.cat(taken).to(device),
        longest_query=int(bounds[0].diff().max()),
        longest_keys=int(bounds[1].diff().max()),
    )


def thd_of(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [sq, b, n, d], keys and values of whole rows [s, b, g, d] → [t, n, d] and twice [t', g, d]."""
    query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    if segments.taken is not None:
        key, value = key.index_select(0, segments.taken), value.index_select(0, segments.taken)
    return query.contiguous(), key.contiguous(), value.contiguous()


def document_attention(base: type[Any]) -> type[Any]:
    """A core attention that takes documents as ``LocalAttention`` does: integers [b, s] as ``attention_mask``.

    Args:
        base: ``TEDotProductAttention``, which does not exist where Transformer Engine is not installed.
    """

    class DocumentAttention(base):
        def __init__(self, *arguments: Any, pg_collection: Any = None, **named: Any) -> None:
            super().__init__(*arguments, pg_collection=pg_collection, **named)
            self._document_cp_group = None if pg_collection is None else pg_collection.cp

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: AttnMaskType,
            **named: Any,
        ) -> Any:
            """query [sq, b, n, d], key and value [sq, b, g, d] → [sq, b, n·d]. Collective over the context group."""
            if attention_mask is None:
                return super().forward(query, key, value, None, attn_mask_type, **named)
            if named.pop("attention_bias", None) is not None or named.pop("packed_seq_params", None) is not None:
                raise ValueError("documents come as attention_mask, without bias and packed_seq_params")
            group, context = self._document_cp_group, WHOLE
            if group is not None and group.size() > 1:
                key, value = gather_sequence(key, group), gather_sequence(value, group)
                context = ContextSlice(group.rank(), group.size())
            segments = segments_of(attention_mask, context)
            # Queries are the last of their segment's keys; where there are as many the two masks are one.
            mask = AttnMaskType.padding_causal if context.size == 1 else _BottomRight.padding_causal_bottom_right
            packed = thd_of(query, key, value, segments)
            out = super().forward(*packed, None, mask, packed_seq_params=segments.packed, **named)
            positions, rows = query.shape[:2]
            return out.reshape(rows, positions, -1).transpose(0, 1).contiguous()

    return DocumentAttention
