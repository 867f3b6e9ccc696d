"""Into which bin a token falls: by its position, by the teacher's entropy, by how sure a model is.

n tokens, K cached tokens of the teacher, F figures, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_EDGES = (0.1, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Where the bins of the teacher's entropy meet, in nats: nine bins, the first from 0, the last without an end. The same
in every run, so that runs compare; a bin that begins at an edge includes it."""
CONFIDENCE_BINS = 15
"""Equal bins of (0, 1]; a confidence on an edge counts in the bin below it."""


def position_ranges(seq_length: int) -> list[tuple[int, int]]:
    """First and last position of each bin: 0, 1, 2–3, 4–7, …, powers of two up to the end of the row."""
    starts = [0, *(2**power for power in range((seq_length - 1).bit_length()))]
    ends = [start - 1 for start in starts[1:]]
    return list(zip(starts, [*ends, seq_length - 1], strict=True))


def position_bins(positions: Tensor) -> Tensor:
    """int64 [n]: the index in ``position_ranges`` of places in a row, int64 [n]."""
    # frexp is exact where a logarithm may miss a power of two: p = m·2^e with 0.5 ≤ m < 1, and 0 for 0.
    return torch.frexp(positions.to(torch.float64)).exponent.to(torch.int64)


def entropy_bins(entropy: Tensor) -> Tensor:
    """int64 [n], of entropies in nats, [n]."""
    edges = torch.tensor(ENTROPY_EDGES, dtype=entropy.dtype, device=entropy.device)
    return torch.bucketize(entropy, edges, right=True)


def confidence_bins(confidence: Tensor) -> Tensor:
    """int64 [n], of probabilities [n]."""
    return ((confidence * CONFIDENCE_BINS).ceil() - 1).clamp(0, CONFIDENCE_BINS - 1).to(torch.int64)


def teacher_entropy(logprobs: Tensor, tail_logmass: Tensor) -> Tensor:
    """−Σ_k p_k·log p_k − p_tail·log p_tail in nats, float64 [n]: the tail is one outcome more.

    So it is at most log(K + 1) and a lower bound of the entropy over the whole vocabulary: what the tail's tokens
    share among themselves is not in it.

    Args:
        logprobs: [n, K], −inf where unused or impossible.
        tail_logmass: [n].
    """
    outcomes = torch.cat([logprobs.double(), tail_logmass.double().unsqueeze(1)], dim=1)
    return torch.special.entr(outcomes.exp()).sum(dim=1)


def sums_by_bin(bins: Tensor, figures: Tensor, count: int) -> Tensor:
    """Σ of figures [n, F] over the tokens of each bin: float64 [B, F], in an order that does not change.

    Args:
        bins: int64 [n].
        count: B.
    """
    member = torch.nn.functional.one_hot(bins, count).to(torch.float64)
    return member.t() @ figures.to(torch.float64)
