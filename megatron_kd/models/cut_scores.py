"""Which FFN rows and which query groups of a layer are worth keeping, from the weights alone.

H hidden, F FFN width, d head size, G query groups, R query heads per group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ffn_row_scores(gate_and_up: Tensor, down: Tensor, glu_linear_offset: float = 0.0) -> Tensor:
    """How much each FFN row of a gated layer can write: ‖gate row‖ · √(offset² + ‖up row‖²) · ‖down column‖.

    For inputs of unit variance the row's activation act(g)·(u + offset) grows with ‖gate row‖ and, as u has mean 0 and
    variance ‖up row‖², with the root mean square of u + offset; what it writes grows with the down column. Without an
    offset it is the product of the three norms. Biases are left out.

    Args:
        gate_and_up: [2, F, H].
        down: [H, F].
        glu_linear_offset: what the architecture adds to the up half.

    Returns:
        [F], float32.
    """
    gate, up = gate_and_up.float().norm(dim=2)
    return gate * (up.square() + glu_linear_offset**2).sqrt() * down.float().norm(dim=0)


def query_group_scores(query_key_value: Tensor, projection: Tensor, groups: int, channels: int) -> Tensor:
    """How much each query group can write: Σ over its heads of ‖W_o,head · W_v,group‖², Frobenius norms.

    That product takes what a head attends to, to what it adds to the residual stream; queries and keys only say where
    the head looks. Biases are left out. The norm of a product from Gram matrices: ‖A·B‖² = Σ (AᵀA)∘(BBᵀ).

    Args:
        query_key_value: [G·(R+2)·d, H], as Megatron-Core packs it.
        projection: [H, G·R·d].
        groups: G.
        channels: d.

    Returns:
        [G], float32.
    """
    hidden = projection.shape[0]
    values = query_key_value.float().view(groups, -1, channels, hidden)[:, -1]
    outputs = projection.float().view(hidden, groups, -1, channels)
    of_values = torch.einsum("gih,gjh->gij", values, values)
    of_outputs = torch.einsum("hgri,hgrj->gij", outputs, outputs)
    return (of_values * of_outputs).sum(dim=(1, 2))


def largest(scores: Tensor | Sequence[float], count: int) -> list[int]:
    """Indices of the ``count`` largest of [n] scores, rising; of equal ones the first."""
    order = torch.as_tensor(scores).argsort(descending=True, stable=True)
    return sorted(order[:count].tolist())
