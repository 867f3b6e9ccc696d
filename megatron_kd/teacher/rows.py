"""Rows that are added so that ranks run alike, and answers of micro batches put together again.

b rows, s positions, m rows of a micro batch, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_kd.config import Recipe
from megatron_kd.models.context_parallel import gather_sequence
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.schedule import micro_batches_together
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.topk import ExtractedTopK


def rows_at_once(recipe: Recipe, groups: ParallelGroups) -> int:
    """Rows that a data-parallel rank scores between two exchanges: a micro batch, or enough to keep all stages busy."""
    return recipe.teacher.capture.micro_batch_size * micro_batches_together(groups)


def rows_together(groups: ParallelGroups, most: int) -> int:
    """Rows that every data-parallel rank must score at least when one of them has ``most``.

    Ranks that share experts take part in each other's forward passes, with rows of their own or without.
    """
    return most if groups.ep_size > 1 else 0


def padded(tokens: Tensor, rows: int) -> Tensor:
    """tokens [b, s] with rows of token 0 added up to ``rows`` of them; unchanged where there are as many."""
    missing = max(0, rows - len(tokens))
    return pad(tokens, (0, 0, 0, missing)) if missing else tokens


def joined(parts: Sequence[ExtractedTopK], length: int, rows: int) -> ExtractedTopK:
    """The answers for micro batches as one, [s·b] sequence first.

    Args:
        parts: at least one, of [s·m] positions each.
        length: s.
        rows: b, the first of all rows; those behind them are dropped.
    """

    def join(*tensors: Tensor) -> Tensor:
        by_row = [tensor.unflatten(0, (length, -1)) for tensor in tensors]
        return torch.cat(by_row, dim=1)[:, :rows].flatten(0, 1)

    if len(parts) == 1 and len(parts[0].targets.ids) == length * rows:
        return parts[0]
    return _each(join, parts)


def of_whole_rows(part: ExtractedTopK, length: int, group: dist.ProcessGroup) -> ExtractedTopK:
    """The answers for a context-parallel rank's positions → those for all, [s·b], the same on every rank.

    Collective over the group.

    Args:
        part: [s/cp·b] positions, sequence first.
        length: s/cp.
    """
    if group.size() == 1:
        return part
    return _each(lambda own: gather_sequence(own.unflatten(0, (length, -1)), group).flatten(0, 1), [part])


def _each(make: Callable[..., Tensor], parts: Sequence[ExtractedTopK]) -> ExtractedTopK:
    """An answer whose every tensor is made of that tensor of all parts."""
    targets = [part.targets for part in parts]
    others = {
        temperature: (
            make(*[part.log_normalizers[temperature][0] for part in parts]),
            make(*[part.log_normalizers[temperature][1] for part in parts]),
        )
        for temperature in parts[0].log_normalizers
    }
    return ExtractedTopK(
        TopKTargets(
            make(*[t.ids for t in targets]),
            make(*[t.logprobs for t in targets]),
            make(*[t.tail_logmass for t in targets]),
            targets[0].temperature,
        ),
        others,
    )
