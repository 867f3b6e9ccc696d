"""From hidden states to top-K targets, chunk by chunk over a head that may be sharded: never [tokens × vocabulary].

N tokens, D hidden, V vocabulary, Vl rows of the head on this rank, K kept tokens, c tokens in a chunk, r in a block of
it, W the columns of the logits buffer: this rank's rows of the vocabulary, rounded up to a multiple of ``COLUMNS``.

Beside the GEMM that writes them, the logits are passed over three times: the maxima of groups of columns, in place
the exponentials of what is not kept, their sum. Everything else looks at K or W / ``COLUMNS`` numbers a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.losses import default_chunk_bytes
from megatron_kd.losses.geometry import row_blocks
from megatron_kd.losses.logits import add_at_, finite_or_zero, owned_columns
from megatron_kd.losses.projection import Projection
from megatron_kd.targets import TopKTargets

COLUMNS = 64
"""Columns in a group. A shard that begins at a multiple of it gives sums of the same bits as the whole head."""
_NO_ID = 2**31 - 1  # in a key: a column of padding
_LN2 = math.log(2.0)


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
    logit_softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
) -> ExtractedTopK:
    """The K most likely tokens of every position, exact over all shards of the head.

    Each rank finds the best K + 1 of its shard; one all_gather of them gives every rank the same global K (ties go to
    the lower id) and the largest logit outside, a second one of a float64 for each temperature the mass outside. From
    equal logits every layout whose shards begin at multiples of ``COLUMNS`` makes the same bits.

    Args:
        hidden: [N, D], the same on every rank of the group.
        weight: [Vl, D], rows vocab_start … vocab_start + Vl − 1; rows from ``vocab_size`` on are padding.
        logit_softcap: the teacher's logits are cap·tanh(h·Wᵀ / cap), before any temperature; None for h·Wᵀ.
        group: the tensor-parallel group; None for a whole head.
        chunk_bytes: budget of the float32 logits buffer; None: that of the losses on this device.

    Raises:
        ValueError: top_k exceeds the vocabulary.
    """
    if top_k > vocab_size:
        raise ValueError(f"top_k {top_k} exceeds the vocabulary of {vocab_size}")
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    # By all rows of the shard, which are as many on every rank: chunks hold collectives.
    rows = chunk_rows(hidden.shape[0], _rounded(weight.shape[0]), chunk_bytes or default_chunk_bytes(hidden.device))
    head = weight[: max(0, min(weight.shape[0], vocab_size - vocab_start))]
    logits = hidden.new_empty((min(rows, hidden.shape[0]), _rounded(head.shape[0])), dtype=torch.float32)
    extractor = _Extractor(top_k, vocab_start, head.shape[0], (temperature, *extra_temperatures), group)
    parts = [extractor.empty(hidden.device)]
    for part in hidden.split(rows) if hidden.shape[0] else ():
        out = logits[: part.shape[0]]
        out[:, head.shape[0] :] = -math.inf
        # Float32 whatever the inputs' dtype: rounding logits to bf16 costs whole percents.
        Projection(head, slice(0, head.shape[0]), torch.float32).logits(part, out=out[:, : head.shape[0]])
        if logit_softcap is not None:
            out[:, : head.shape[0]].div_(logit_softcap).tanh_().mul_(logit_softcap)
        parts += [extractor.extract(out[block]) for block in extractor.blocks(out)]
    ids, logprobs, normalizers, tails = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    targets = TopKTargets(ids, logprobs, tails[:, 0].contiguous(), temperature)
    others = {
        t: (normalizers[:, i].contiguous(), tails[:, i].contiguous()) for i, t in enumerate(extra_temperatures, start=1)
    }
    return ExtractedTopK(targets, others)


def _rounded(columns: int) -> int:
    """At least one group of columns, so that no tensor is empty."""
    return max(1, math.ceil(columns / COLUMNS)) * COLUMNS


_Part = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of r tokens and t temperatures: ids [r, K], log-probs [r, K], log-normalizers [r, t], log tail masses [r, t]."""


@dataclass(frozen=True)
class _Extractor:
    """What is done with logits once they are there.

    Attributes:
        top_k: K.
        vocab_start: id of column 0.
        width: columns that are vocabulary.
        temperatures: T0, then the others.
        group: ranks that hold the other columns; None for none.
    """

    top_k: int
    vocab_start: int
    width: int
    temperatures: tuple[float, ...]
    group: dist.ProcessGroup | None

    def empty(self, device: torch.device) -> _Part:
        kept = torch.zeros((0, self.top_k), device=device)
        sums = torch.zeros((0, len(self.temperatures)), device=device)
        return kept.to(torch.int32), kept, sums, sums

    def blocks(self, logits: Tensor) -> list[slice]:
        """Rows that are done together: few enough for the cache of a CPU; all where other devices or ranks wait."""
        if self.group is not None or logits.device.type != "cpu":
            return [slice(0, logits.shape[0])]
        return list(row_blocks(logits.shape[0], 4 * logits.shape[1], logits.device))

    def extract(self, logits: Tensor) -> _Part:
        """The targets of logits [r, W], which are overwritten."""
        keys = self._best_of_all(self._best_of_shard(logits))
        values, ids = _values_and_ids(keys[:, : self.top_k])
        largest_outside = _values_and_ids(keys[:, self.top_k :])[0]
        # The tail is a sum over what is outside: 1 − Σ of the kept loses all digits where little is outside.
        columns, owned = owned_columns(ids, self.vocab_start, self.width)
        add_at_(logits, columns, torch.where(owned, -math.inf, 0.0))
        outside = self._log_sums(logits, largest_outside)
        exact = values.double()
        inside = torch.stack([torch.logsumexp(exact / t, dim=1) for t in self.temperatures], dim=1)
        lse = torch.logaddexp(inside, outside)
        logprobs = exact / self.temperatures[0] - lse[:, :1]
        ratios = torch.tensor([self.temperatures[0] / t for t in self.temperatures], dtype=lse.dtype, device=lse.device)
        return ids, logprobs.float(), (lse - lse[:, :1] * ratios).float(), (outside - lse).float()

    def _best_of_shard(self, logits: Tensor) -> Tensor:
        """Keys [r, K + 1] of the best columns, in no order."""
        count = min(self.top_k + 1, logits.shape[1])
        values, columns = _largest(logits, count)
        if count > self.top_k:
            _take_lowest_of_equals_(logits, values, columns, self.top_k)
        ids = torch.where(columns < self.width, columns + self.vocab_start, _NO_ID)
        ids[:, self.top_k :] = _NO_ID  # never kept, only its value counts; among equals it may be any of them
        keys = _keys(values, ids)
        return torch.nn.functional.pad(keys, (0, self.top_k + 1 - count), value=_KEY_OF_NOTHING)

    def _best_of_all(self, keys: Tensor) -> Tensor:
        """The best K + 1 keys [r, K + 1] of all ranks, descending."""
        if self.group is not None:
            gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(gathered, keys.contiguous(), group=self.group)
            keys = torch.cat(gathered, dim=1)
        return torch.sort(keys, dim=1, descending=True).values[:, : self.top_k + 1]

    def _log_sums(self, logits: Tensor, largest: Tensor) -> Tensor:
        """log Σ exp(logit / T) over all ranks, float64 [r, t]; ``logits`` [r, W] are overwritten.

        Args:
            largest: [r, 1], no logit exceeds it: sums relative to it neither overflow nor vanish.
        """
        shifts, sums = [], []
        for i, temperature in enumerate(self.temperatures):
            # Base 2, which CPUs raise three times as fast. The shift is rounded before it is used, hence exact.
            scale = 1.0 / (temperature * _LN2)
            shift = finite_or_zero(largest) * scale
            last = i == len(self.temperatures) - 1
            relative = torch.add(-shift, logits, alpha=scale, out=logits if last else torch.empty_like(logits))
            grouped = relative.exp2_().view(len(logits), -1, COLUMNS).sum(dim=2)
            shifts.append(shift.double())
            sums.append(grouped.sum(dim=1, keepdim=True, dtype=torch.float64))
        total = torch.cat(sums, dim=1)
        if self.group is not None:
            gathered = [torch.empty_like(total) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(gathered, total, group=self.group)
            total = torch.stack(gathered).sum(dim=0)
        return total.log() + torch.cat(shifts, dim=1) * _LN2


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``torch.topk`` of every row [r, W], sorted, reading most of a wide one only once.

    The count-th largest maximum of a group of columns is a lower bound of the count-th largest logit: what exceeds it
    lies in the groups that have the largest maxima.
    """
    rows, width = logits.shape
    if width < 2 * count * COLUMNS:
        values, columns = torch.topk(logits, count, dim=1)
        return values, columns
    groups = width // COLUMNS
    best = torch.topk(logits.view(rows, groups, COLUMNS).amax(dim=2), count, dim=1, sorted=False).indices
    flat = (best + torch.arange(0, rows * groups, groups, device=best.device)[:, None]).flatten()
    candidates = logits.view(-1, COLUMNS).index_select(0, flat).view(rows, count * COLUMNS)
    values, places = torch.topk(candidates, count, dim=1)
    return values, best.gather(1, places // COLUMNS) * COLUMNS + places % COLUMNS


def _take_lowest_of_equals_(logits: Tensor, values: Tensor, columns: Tensor, top_k: int) -> None:
    """Puts the lowest columns among the first K of [r, K + 1] where more logits equal the K-th than there is room for.

    ``torch.topk`` takes any of them, not the same ones on every device or in every sharding.
    """
    last = values[:, top_k - 1]
    crowded = ((last == values[:, top_k]) & (last > -math.inf)).nonzero()[:, 0]
    for rows in crowded.split(max(1, len(logits) // 8)):  # few need it; of many, not all at once
        kept = values[rows, :top_k] == last[rows, None]
        equal = logits[rows] == last[rows, None]
        chosen = equal & (equal.cumsum(dim=1, dtype=torch.int32) <= kept.sum(dim=1, keepdim=True))
        # The values descend, so that those equal to the last stand at the end of the K.
        columns[rows, :top_k] = columns[rows, :top_k].masked_scatter(kept, chosen.nonzero()[:, 1])


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 that order as (value, then the lower id first): the order of float32 is that of these integers."""
    bits = (values + 0.0).view(torch.int32)  # −0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (_NO_ID - ids.to(torch.int64))


_KEY_OF_NOTHING = int(_keys(torch.tensor([-math.inf]), torch.tensor([_NO_ID])))


def _values_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: float32 and int32; the id is −1 where the value is −inf."""
    ordered = (keys >> 32).to(torch.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    ids = (_NO_ID - (keys & 0xFFFFFFFF)).to(torch.int32)
    return values, torch.where(values == -math.inf, -1, ids)
