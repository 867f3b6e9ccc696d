"""Textbook formulas on whole logits, differentiated by autograd: the mathematics of the dense reference.

n rows, V columns of this shard, K cached ids. A result is replicated over the tensor-parallel group, and every value
that enters a formula is replicated before it does, so that its gradient is whole on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.collectives import TensorParallelGroup, differentiable_sum
from megatron_kd.losses.logits import finite_or_zero, owned_columns, row_max


def project(hidden: Tensor, weight: Tensor, arguments: LossArguments, softcap: float | None) -> Tensor:
    """hidden [n, D], weight [Vl, D] → y [n, V], the logits before the temperature, in the dtype of the arithmetic."""
    x = linear(hidden.to(arguments.dtype), weight[: arguments.vocab_rows].to(arguments.dtype))
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def log_sum_exp(z: Tensor, tp: TensorParallelGroup) -> Tensor:
    """[n], over the columns of all ranks; −inf, with a gradient of 0, where all of them are −inf."""
    shift = finite_or_zero(tp.max(row_max(z.detach())))
    total = differentiable_sum((z - shift[:, None]).exp().sum(dim=1), tp)
    empty = total == 0
    return torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + shift)


def at_ids(z: Tensor, ids: Tensor, arguments: LossArguments) -> Tensor:
    """z at global ids [n, K], fetched from the ranks that own them; 0 for the id −1."""
    columns, owned = owned_columns(ids, arguments.vocab_start, arguments.vocab_rows)
    if z.shape[1] == 0:
        # Still a function of z, so that this rank's backward pass joins the collectives of the others.
        here = z.sum() * z.new_zeros(ids.shape)
    else:
        here = torch.where(owned, z.gather(1, columns), 0.0)
    return differentiable_sum(here, arguments.tp)


def outside_ids(z: Tensor, ids: Tensor, arguments: LossArguments) -> Tensor:
    """z with −inf at global ids [n, K]."""
    if z.shape[1] == 0:
        return z
    columns, owned = owned_columns(ids, arguments.vocab_start, arguments.vocab_rows)
    inside = torch.zeros(z.shape, dtype=torch.int8, device=z.device).scatter_add_(1, columns, owned.to(torch.int8))
    return z.masked_fill(inside != 0, -torch.inf)


def cross_entropy(y: Tensor, labels: Tensor, valid: Tensor, arguments: LossArguments) -> Tensor:
    """[n] at temperature 1; 0 where the label is −100 or the row is not valid."""
    counted = (labels >= 0) & valid
    ids = torch.where(counted, labels, -1)[:, None]
    nll = log_sum_exp(y, arguments.tp) - at_ids(y, ids, arguments)[:, 0]
    return torch.where(counted, nll, 0.0)


def kl_terms(p: Tensor, log_q: Tensor) -> Tensor:
    """p(log p − log q), 0 where p is 0 whatever q is."""
    counted = p != 0
    safe_p, safe_q = torch.where(counted, p, 1.0), torch.where(counted, log_q, 0.0)
    return torch.where(counted, p * (safe_p.log() - safe_q), 0.0)
