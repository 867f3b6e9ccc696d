"""The collectives of the losses over one tensor-parallel group, plain and differentiable.

A group of None is one rank: every function is then the identity and torch.distributed is not touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """The result of a collective that runs beside other work; nobody reads it before ``wait``."""

    def __init__(self, result: Tensor, work: dist.Work | None, source: Tensor | None = None) -> None:
        self._result = result
        self._work = work
        # What is sent has to stay alive until it is sent.
        self._source = source

    def wait(self) -> Tensor:
        """The result. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = self._source = None
        return self._result


class TensorParallelGroup:
    """Rank and size of a process group, and the few collectives the losses need."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def start_stack(self, local: Tensor) -> Pending:
        """``local`` [...] of every rank → [size, ...] in rank order, by one all_gather."""
        if self.size == 1:
            return Pending(local.unsqueeze(0), None)
        local = local.contiguous()
        gathered = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        work = dist.all_gather_into_tensor(gathered, local, group=self.group, async_op=True)
        return Pending(gathered.view(self.size, *local.shape), work, local)

    def stack(self, local: Tensor) -> Tensor:
        """``start_stack``, waited for."""
        return self.start_stack(local).wait()

    def start_gather_rows(self, local: Tensor) -> Pending:
        """[n, D] of every rank → [size·n, D] in rank order."""
        if self.size == 1:
            return Pending(local, None)
        local = local.contiguous()
        gathered = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        return Pending(gathered, dist.all_gather_into_tensor(gathered, local, group=self.group, async_op=True), local)

    def start_sum_rows(self, partial: Tensor, scatter: bool) -> Pending:
        """Σ over ranks of ``partial`` [size·n, D] (overwritten): of all rows, or of this rank's n with ``scatter``."""
        if self.size == 1:
            return Pending(partial, None)
        if not scatter:
            return Pending(partial, dist.all_reduce(partial, group=self.group, async_op=True))
        partial = partial.contiguous()
        local = partial.new_empty((partial.shape[0] // self.size, *partial.shape[1:]))
        return Pending(local, dist.reduce_scatter_tensor(local, partial, group=self.group, async_op=True), partial)

    def gather_rows(self, local: Tensor) -> Tensor:
        """[n, D] of every rank → [size·n, D] in rank order."""
        return self.start_gather_rows(local).wait()

    def reduce_scatter_rows(self, full: Tensor) -> Tensor:
        """[size·n, D] on every rank → the sum over ranks of this rank's n rows [n, D]."""
        return self.start_sum_rows(full, scatter=True).wait()

    def sum_(self, tensor: Tensor) -> Tensor:
        """``tensor`` (contiguous) summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, detached."""
        largest = tensor.detach().clone()
        if self.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest


class _Enter(torch.autograd.Function):
    """A replicated tensor enters the sharded region: identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.sum_(gradient.clone(memory_format=torch.contiguous_format)), None


class _GatherRows(torch.autograd.Function):
    """A row-sharded tensor enters: all_gather forward, reduce_scatter backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tp.gather_rows(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.reduce_scatter_rows(gradient), None


class _Sum(torch.autograd.Function):
    """Partial sums leave as a replicated value: all_reduce forward, identity backward.

    The identity is what keeps the gradient of a replicated loss from being multiplied by the size of the group.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tp: TensorParallelGroup) -> Tensor:
        return tp.sum_(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter_sharded(hidden: Tensor, tp: TensorParallelGroup, sequence_parallel: bool) -> Tensor:
    """Hidden states [n, D] as every rank needs them, [N, D].

    Replicated hidden states: identity, their gradient is all-reduced. Under sequence parallelism: all_gather of the
    row slices, the gradient is reduce-scattered.
    """
    if tp.size == 1:
        return hidden
    result: Tensor = _GatherRows.apply(hidden, tp) if sequence_parallel else _Enter.apply(hidden, tp)
    return result


def differentiable_sum(partial: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Σ over ranks of ``partial``, replicated; the gradient passes through unchanged."""
    if tp.size == 1:
        return partial
    result: Tensor = _Sum.apply(partial, tp)
    return result
