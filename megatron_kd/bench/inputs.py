"""What all implementations are given: hidden states, a head, and a teacher's top-K targets, made up.

N tokens, D hidden, V vocabulary, K cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.targets import TopKTargets


@dataclass(frozen=True)
class LossInputs:
    """The inputs of one measurement.

    Attributes:
        hidden: [N, D].
        head: [V, D], the same dtype.
        targets: ids [N, K], log-probabilities [N, K], the tail's log-mass [N].
        token_weights: float32 [N], on the CPU, where a batch is made.
    """

    hidden: Tensor
    head: Tensor
    targets: TopKTargets
    token_weights: Tensor

    @property
    def vocab(self) -> int:
        """V."""
        return self.head.shape[0]

    @property
    def tokens(self) -> int:
        """N."""
        return self.hidden.shape[0]


def make_inputs(
    tokens: int, hidden: int, vocab: int, top_k: int, dtype: torch.dtype, place: torch.device
) -> LossInputs:
    """Logits that spread as those of trained models do (standard deviation 2) and targets whose top K hold 0.95."""
    generator = torch.Generator(device=place).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=place).to(dtype)
    head = torch.randn(vocab, hidden, generator=generator, device=place).mul_(2 / hidden**0.5).to(dtype)
    targets = make_targets(tokens, vocab, top_k, place, generator)
    return LossInputs(states, head, targets, torch.ones(tokens))


def make_targets(
    tokens: int, vocab: int, top_k: int, place: torch.device, generator: torch.Generator | None = None
) -> TopKTargets:
    """Targets whose top K hold 0.95: ids int32 [N, K], log-probabilities float16 [N, K], the tail's log-mass [N]."""
    # K distinct ids, spread over the vocabulary: a random start, and a stride with K strides at most V.
    start = torch.randint(vocab, (tokens, 1), generator=generator, device=place)
    ids = (start + vocab // top_k * torch.arange(top_k, device=place)) % vocab
    scores = torch.randn(tokens, top_k, generator=generator, device=place).mul_(2).sort(dim=1, descending=True).values
    mass = torch.tensor(0.95)
    logprobs = torch.log_softmax(scores, dim=1) + mass.log()
    tail = torch.full((tokens,), (1 - mass).log().item(), device=place)
    return TopKTargets(ids.to(torch.int32), logprobs.to(torch.float16), tail)
