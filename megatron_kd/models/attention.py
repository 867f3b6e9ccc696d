"""Attention of the local backend: sinks, sliding windows, grouped queries, packed documents, context parallelism.

Megatron-Core's local attention knows one document a row and no context parallelism; this one takes its place on the
CPU, and on a GPU without Transformer Engine.

b rows, s positions of a row (sq of them on this rank), n heads and g key-value heads on this rank, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.models.context_parallel import gather_sequence

# Queries at a time: what bounds the scores held at once where attention has sinks or a mask.
BLOCK = 512


class LocalAttention(MegatronModule):
    """Core attention with Megatron-Core's interface; no dropout.

    ``attention_mask`` is no mask here: it carries the documents of the whole row, integers [b, s], equal within a
    document; None where a row is one document. Attention is causal and stays within a document.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Raises ValueError for settings that this attention does not compute."""
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if config.attention_dropout or attention_dropout:
            raise ValueError("the local attention has no dropout: set attention_dropout to 0")
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError("the local attention is causal self-attention only")
        assert config.kv_channels is not None
        self._tp_group, self._cp_group = pg_collection.tp, pg_collection.cp
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self._window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number)):
            assert config.window_size is not None
            self._window = config.window_size[0] + 1
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self._tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            if config.perform_initialization and config.init_method is not None:
                config.init_method(self.softmax_offset)
            # Each rank has its own heads: without this mark the gradient's norm counts those of one rank alone.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ValueError(f"the local attention does not compute softmax_type {config.softmax_type!r}")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [sq, b, n, d], key and value [sq, b, g, d] → [sq, b, n·d]. Collective over the context-parallel group.

        Args:
            attention_mask: the documents, see the class.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("the local attention takes documents as attention_mask, no bias and no packed_seq_params")
        size, rank = self._cp_group.size(), self._cp_group.rank()
        key, value = gather_sequence(key, self._cp_group), gather_sequence(value, self._cp_group)
        # [b, g or n, s, d], as every kernel wants it.
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        parts, start = [], 0
        for run in ContextSlice(rank, size).ranges(key.shape[2]):
            part = query[:, :, start : start + len(run)]
            parts.append(
                attend(part, key, value, run.start, attention_mask, self._window, self.softmax_offset, self._scale)
            )
            start += len(run)
        context = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return context.permute(2, 0, 1, 3).reshape(query.shape[2], query.shape[0], -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The sinks, split by heads, under the keys that Megatron-Core's own attentions use."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=None if metadata is None else metadata.get("dp_cp_group"),
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    documents: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Causal attention of a run of queries at the positions first, first + 1, … → [b, n, q, d].

    The scores of at most ``BLOCK`` queries with the keys they can see are made at a time.

    Args:
        query: [b, n, q, d]; key, value: [b, g, s, d] from position 0 on.
        documents: integers [b, s]; None: one a row.
        window: positions seen, the own one included; None: all before.
        sinks: [n], one logit a head that takes part in the softmax and has no value; None: none.
        scale: of the scores.
    """
    if documents is None and window is None and sinks is None and first == 0:
        seen = slice(0, query.shape[2])
        return scaled_dot_product_attention(
            query, key[:, :, seen], value[:, :, seen], is_causal=True, scale=scale, enable_gqa=True
        )
    blocks = []
    for start in range(0, query.shape[2], BLOCK):
        block = query[:, :, start : start + BLOCK]
        at = range(first + start, first + start + block.shape[2])
        oldest = 0 if window is None else max(0, at.start - window + 1)
        allowed = _allowed(at, range(oldest, at.stop), documents, window, query.device)
        seen = slice(oldest, at.stop)
        if sinks is None:
            blocks.append(
                scaled_dot_product_attention(
                    block, key[:, :, seen], value[:, :, seen], attn_mask=allowed, scale=scale, enable_gqa=True
                )
            )
        else:
            blocks.append(_with_sinks(block, key[:, :, seen], value[:, :, seen], allowed, sinks, scale))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _allowed(queries: range, keys: range, documents: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees: bool [1 or b, 1, q, k]."""
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)[None, :]
    seen = k <= q
    if window is not None:
        seen &= q - k < window
    if documents is None:
        return seen[None, None]
    same = documents[:, queries.start : queries.stop, None] == documents[:, None, keys.start : keys.stop]
    return (seen & same)[:, None]


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """softmax over the scores and the head's sink, the sink's part dropped; in float32 at least."""
    b, n, q, d = query.shape
    g = key.shape[1]
    # The n/g heads of a group lie one below the other, so that keys are not repeated.
    scores = torch.matmul(query.reshape(b, g, n // g * q, d), key.transpose(2, 3)).view(b, n, q, -1) * scale
    exact = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(exact).masked_fill(~allowed, -torch.inf)
    sink = sinks.to(exact).view(1, n, 1, 1).expand(b, n, q, 1)
    probabilities = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype)
    return torch.matmul(probabilities.reshape(b, g, n // g * q, -1), value).view(b, n, q, d)
