"""Sequences gathered from the context-parallel ranks; ``ContextSlice`` says which positions each holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_kd.data.context_slice import ContextSlice


def gather_sequence(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's [s/cp, …] → the whole [s, …] in the sequence's own order. Differentiable: gradients are summed.

    Collective over the group, forward and backward.
    """
    size = group.size()
    if size == 1:
        return local
    gathered = gather_from_sequence_parallel_region(local, group=group)
    length = gathered.shape[0]
    order = torch.cat([ContextSlice(rank, size).positions(length) for rank in range(size)])
    return gathered[order.argsort().to(local.device)]
