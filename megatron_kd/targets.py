"""The narrow waist between teacher, cache and loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopKTargets:
    """The teacher's distribution at some token positions: its K most likely tokens and the mass outside them.

    All leading dimensions are token positions, already aligned to the predicted token: row n is the distribution
    of the token *after* position n. The loss never shifts.

    Attributes:
        ids: int32 [..., K], distinct in a row, −1 where unused.
        logprobs: float [..., K], natural log of the teacher's probability at ``temperature``, −inf where unused.
        tail_logmass: float32 [...], log of the probability outside ``ids``, measured when the targets were made.
        temperature: the softmax temperature of ``logprobs`` and ``tail_logmass``.
    """

    ids: Tensor
    logprobs: Tensor
    tail_logmass: Tensor
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError where shapes, dtypes or the temperature contradict the description."""
        if self.ids.shape != self.logprobs.shape:
            raise ValueError(f"ids {tuple(self.ids.shape)} and logprobs {tuple(self.logprobs.shape)} differ in shape")
        if self.tail_logmass.shape != self.ids.shape[:-1]:
            raise ValueError(
                f"tail_logmass has shape {tuple(self.tail_logmass.shape)}, the ids need {tuple(self.ids.shape[:-1])}"
            )
        if self.ids.dtype != torch.int32:
            raise ValueError(f"ids must be int32, not {self.ids.dtype}")
        if not self.logprobs.is_floating_point() or not self.tail_logmass.is_floating_point():
            raise ValueError("logprobs and tail_logmass must be floating point")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, not {self.temperature}")

    @property
    def top_k(self) -> int:
        """K, the number of slots in a row."""
        return int(self.ids.shape[-1])

    def flatten(self) -> TopKTargets:
        """The same targets with one leading dimension: ids [N, K], logprobs [N, K], tail_logmass [N]."""
        k = self.top_k
        return TopKTargets(
            self.ids.reshape(-1, k), self.logprobs.reshape(-1, k), self.tail_logmass.reshape(-1), self.temperature
        )

    def to(self, device: torch.device | str) -> TopKTargets:
        """The same targets on another device (asynchronously where the source is pinned)."""
        return TopKTargets(
            self.ids.to(device, non_blocking=True),
            self.logprobs.to(device, non_blocking=True),
            self.tail_logmass.to(device, non_blocking=True),
            self.temperature,
        )

    def fold_beyond(self, vocab_size: int) -> None:
        """Takes the ids from ``vocab_size`` on out of the rows, in place: their mass joins the tail.

        For a student whose vocabulary ends before the teacher's: what it cannot say is an outcome outside its top K.
        """
        beyond = self.ids >= vocab_size
        dropped = self.logprobs.float().masked_fill(~beyond, -torch.inf).logsumexp(dim=-1)
        self.tail_logmass.copy_(torch.logaddexp(self.tail_logmass.float(), dropped).clamp(max=0.0))
        self.ids.masked_fill_(beyond, -1)
        self.logprobs.masked_fill_(beyond, -torch.inf)
