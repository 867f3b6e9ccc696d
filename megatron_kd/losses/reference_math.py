"""Textbook formulas on whole logits, differentiated by autograd: the mathematics of the dense reference.

n rows, V columns of this shard, K cached ids. A result is replicated over the tensor-parallel group, and every value
that enters a formula is replicated before it does, so that its gradient is whole on every rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.collectives import TensorParallelGroup, differentiable_sum
from megatron_kd.losses.divergences import Divergence
from megatron_kd.losses.head_product import HeadProduct
from megatron_kd.losses.logits import finite_or_zero, owned_columns, row_max


def project(hidden: Tensor, weight: Tensor, arguments: LossArguments, softcap: float | None) -> Tensor:
    """hidden [n, D], weight [Vl, D] → y [n, V], the logits before the temperature, in the dtype of the arithmetic."""
    x = HeadProduct(weight[: arguments.vocab_rows], arguments.dtype)(hidden)
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


def divergence_terms(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> Tensor:
    """d(p, q) of every entry by the textbook formulas, −inf allowed in both; differentiable in log q.

    Every branch is finite with a finite gradient, also where it is not taken: 0·∞ in a backward pass is NaN.
    """
    p, q_exists = log_p.exp(), log_q != -torch.inf
    safe_q = torch.where(q_exists, log_q, 0.0)
    q = torch.where(q_exists, safe_q.exp(), 0.0)
    if divergence.name == "tvd":
        return 0.5 * (q - p).abs()
    if divergence.name == "reverse_kl":
        return q * (safe_q - log_p)
    p_exists = log_p != -torch.inf
    safe_p = torch.where(p_exists, log_p, 0.0)
    if divergence.name == "forward_kl":
        return torch.where(p_exists, p * (safe_p - safe_q), 0.0)
    beta, nothing = divergence.beta, -1e4
    log_m = torch.logaddexp(
        torch.where(p_exists, safe_p, nothing) + math.log(beta),
        torch.where(q_exists, safe_q, nothing) + math.log(1.0 - beta),
    )
    return beta * p * (safe_p - log_m) + (1.0 - beta) * q * (safe_q - log_m)
