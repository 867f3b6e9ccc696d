"""From hidden states to top-K targets, chunk by chunk over a head that may be sharded: never [tokens × vocabulary].

N tokens, D hidden, V vocabulary, Vl rows of the head on this rank, K kept tokens, c tokens in a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.losses import default_chunk_bytes
from megatron_kd.losses.logits import add_at_, owned_columns
from megatron_kd.losses.projection import Projection
from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class ExtractedTopK:
    """Targets at the first temperature, and what other temperatures need.

    Attributes:
        targets: ids [N, K] in descending order of probability, log-probs float32, tail.
        log_normalizers: for each further temperature T a pair of float32 [N]: with T0 that of the targets
            log Σ_v p_T0(v)^(T0/T), so that log p_T(v) = (T0/T)·log p_T0(v) − it; and the log tail mass at T.
    """

    targets: TopKTargets
    log_normalizers: dict[float, tuple[Tensor, Tensor]]


def chunk_rows(tokens: int, local_vocab: int, chunk_bytes: int) -> int:
    """Rows of float32 logits that fit the budget, balanced over the chunks; at least one."""
    most = max(1, chunk_bytes // (4 * local_vocab))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, math.ceil(tokens / chunks))


@torch.no_grad()
def extract_top_k(
    hidden: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    temperature: float = 1.0,
    extra_temperatures: tuple[float, ...] = (),
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
) -> ExtractedTopK:
    """The K most likely tokens of every position, exact over all shards of the head.

    Each rank finds the best K of its shard; one all_gather of K candidates and the shard's log-sum-exp per token
    gives every rank the same global K (ties go to the lower id), a second one of one float the mass outside them.

    Args:
        hidden: [N, D], the same on every rank of the group.
        weight: [Vl, D], rows vocab_start … vocab_start + Vl − 1; rows from ``vocab_size`` on are padding.
        group: the tensor-parallel group; None for a whole head.
        chunk_bytes: budget of the float32 logits buffer; None: that of the losses on this device.

    Raises:
        ValueError: top_k exceeds the vocabulary.
    """
    if top_k > vocab_size:
        raise ValueError(f"top_k {top_k} exceeds the vocabulary of {vocab_size}")
    rows = chunk_rows(hidden.shape[0], weight.shape[0], chunk_bytes or default_chunk_bytes(hidden.device))
    real = max(0, min(weight.shape[0], vocab_size - vocab_start))
    head = weight[:real]
    parts = [
        _chunk(part, head, top_k, vocab_start, temperature, extra_temperatures, group)
        for part in hidden.split(rows)
        if part.shape[0]
    ]
    if not parts:
        empty = hidden.new_zeros((0,), dtype=torch.float32)
        none = TopKTargets(
            torch.zeros((0, top_k), dtype=torch.int32, device=hidden.device),
            empty.new_zeros((0, top_k)),
            empty,
            temperature,
        )
        return ExtractedTopK(none, dict.fromkeys(extra_temperatures, (empty, empty)))
    ids, logprobs, tails, extras = zip(*parts, strict=True)
    targets = TopKTargets(torch.cat(ids), torch.cat(logprobs), torch.cat(tails), temperature)
    normalizers = {
        t: (torch.cat([e[i][0] for e in extras]), torch.cat([e[i][1] for e in extras]))
        for i, t in enumerate(extra_temperatures)
    }
    return ExtractedTopK(targets, normalizers)


_Chunk = tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]


def _chunk(
    hidden: Tensor,
    head: Tensor,
    top_k: int,
    vocab_start: int,
    temperature: float,
    extra_temperatures: tuple[float, ...],
    group: dist.ProcessGroup | None,
) -> _Chunk:
    width = head.shape[0]
    logits = hidden.new_empty((hidden.shape[0], width), dtype=torch.float32)
    # Float32 whatever the inputs' dtype: rounding logits to bf16 costs whole percents.
    Projection(head, slice(0, width), torch.float32).logits(hidden, out=logits)
    if temperature != 1.0:
        logits /= temperature
    values, ids = _local_top(logits, top_k, vocab_start)
    values, ids = _global_top(values, ids, top_k, group)
    lse = _logsumexp_over_shards(_logsumexp(logits), group)
    # The tail is a masked sum: 1 − Σ of the kept loses all digits where little is outside.
    columns, owned = owned_columns(ids, vocab_start, width)
    add_at_(logits, columns, torch.where(owned, -math.inf, 0.0))
    tail = _logsumexp_over_shards(_logsumexp(logits), group) - lse
    extras = []
    for t in extra_temperatures:
        ratio = temperature / t
        outside = _logsumexp_over_shards(_logsumexp(logits * ratio), group)
        inside = torch.logsumexp(values * ratio, dim=1)
        lse_t = torch.logaddexp(outside, inside)
        extras.append((lse_t - lse * ratio, outside - lse_t))
    return ids.to(torch.int32), values - lse[:, None], tail, extras


def _logsumexp(logits: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -math.inf)
    return torch.logsumexp(logits, dim=1)


def _local_top(logits: Tensor, top_k: int, vocab_start: int) -> tuple[Tensor, Tensor]:
    """The best min(K, real) of this shard, filled up to K with −inf so that all ranks gather equal shapes."""
    count = min(top_k, logits.shape[1])
    values, columns = torch.topk(logits, count, dim=1)
    if count:
        columns = _lowest_of_equals(logits, values, columns)
    ids = columns + vocab_start
    if count < top_k:
        missing = (logits.shape[0], top_k - count)
        values = torch.cat((values, values.new_full(missing, -math.inf)), dim=1)
        ids = torch.cat((ids, ids.new_full(missing, -1)), dim=1)
    return values, ids


def _lowest_of_equals(logits: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """The columns [c, K] with the lower ones chosen where more logits equal the K-th than there is room for.

    ``torch.topk`` takes any of them, not the same ones on every device or in every sharding.
    """
    last = values[:, -1:]
    room = (values == last).sum(dim=1)
    crowded = ((logits == last).sum(dim=1) > room).nonzero()[:, 0]
    if not len(crowded):
        return columns
    equal = logits[crowded] == last[crowded]
    chosen = equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room[crowded, None])
    columns = columns.clone()
    # The values descend, so that those equal to the last stand at the end of the row.
    columns[crowded] = columns[crowded].masked_scatter(values[crowded] == last[crowded], chosen.nonzero()[:, 1])
    return columns


def _global_top(values: Tensor, ids: Tensor, top_k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    if group is not None:
        packed = torch.cat((values, ids.to(torch.int32).view(torch.float32)), dim=1).contiguous()
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, packed, group=group)
        values = torch.cat([g[:, :top_k] for g in gathered], dim=1)
        ids = torch.cat([g[:, top_k:].contiguous().view(torch.int32) for g in gathered], dim=1).to(torch.int64)
    # Two stable sorts: by id, then by value. Equal values keep ascending ids on every rank and in every layout.
    ids, order = torch.sort(ids, dim=1, stable=True)
    values = values.gather(1, order)
    values, order = torch.sort(values, dim=1, descending=True, stable=True)
    return values[:, :top_k].contiguous(), ids.gather(1, order)[:, :top_k].contiguous()


def _logsumexp_over_shards(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Combines each rank's log-sum-exp [c] in rank order, so that all ranks get the same bits."""
    if group is None:
        return local
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local.contiguous(), group=group)
    return torch.logsumexp(torch.stack(gathered), dim=0)
