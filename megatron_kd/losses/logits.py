"""Small operations on a block of logits [n, V] that all row kernels share; V may be 0 (a shard of padding only).

None of them allocates a second block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_(logits: Tensor, temperature: float, softcap: float | None) -> Tensor | None:
    """Turns raw logits x into z = y/T in place, y = cap·tanh(x/cap) or x.

    Returns:
        dy/dx [n, V] where a soft-cap applies (a second block), else None.
    """
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = torch.square(logits).neg_().add_(1.0)
        logits.mul_(softcap / temperature)
    elif temperature != 1.0:
        logits.mul_(1.0 / temperature)
    return slope


def owned_columns(ids: Tensor, vocab_start: int, vocab_rows: int) -> tuple[Tensor, Tensor]:
    """Global ids (−1 where unused) → (int64 column in this shard, 0 where not owned; bool owned), same shape."""
    local = ids.to(torch.int64) - vocab_start
    owned = (ids >= 0) & (local >= 0) & (local < vocab_rows)
    return torch.where(owned, local, 0), owned


def take(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[n, K] logits at ``columns``, −inf where not owned."""
    if logits.shape[1] == 0:
        return logits.new_full(columns.shape, -torch.inf)
    return torch.where(owned, logits.gather(1, columns), -torch.inf)


def add_at_(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """Adds values [n, K] at ``columns``, which may repeat where the value is 0 (the slots that are not owned)."""
    if logits.shape[1]:
        logits.scatter_add_(1, columns, values.to(logits.dtype))


def row_max(logits: Tensor) -> Tensor:
    """[n], −inf for an empty row."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -torch.inf)
    return logits.amax(dim=1)


def finite_or_zero(shift: Tensor) -> Tensor:
    """A shift that may be subtracted: 0 where the maximum is −inf, since −inf − (−inf) is NaN."""
    return torch.where(shift == -torch.inf, 0.0, shift)


def log_of_sums(maxima: Tensor, sums: Tensor) -> Tensor:
    """Per rank a maximum and Σexp relative to it [tp, n] → the logsumexp over all ranks [n], in rank order."""
    top = maxima.amax(dim=0)
    return (sums * (maxima - finite_or_zero(top)).exp()).sum(dim=0).log() + top
