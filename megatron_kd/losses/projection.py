"""The three GEMMs of a language-model head, with float32 accuracy from 16-bit inputs.

c tokens in a chunk, D hidden, V the true vocabulary rows of this rank's shard, Vl all its rows (V and padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of a 16-bit head, this much is widened to float32 at a time.
_PANEL_BYTES = 4 << 20


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


class Projection:
    """logits = h·Wᵀ and its two gradients over the ``rows`` of a head that are vocabulary (V of them).

    Logits are computed and returned in ``dtype`` (float32; float64 for float64 inputs): rounding them to bfloat16
    would cost 1 % of the gradient and more at large logits. On a GPU with 16-bit inputs the GEMM itself writes
    float32 and only dz is rounded for the two gradient GEMMs; elsewhere 16-bit inputs are widened panel by panel.
    """

    def __init__(self, weight: Tensor, rows: slice, dtype: torch.dtype) -> None:
        self.head = weight.detach()[rows]
        self.dtype = dtype

    def native(self, hidden: Tensor) -> bool:
        """Whether the GEMM takes 16-bit inputs and writes float32."""
        return hidden.is_cuda and hidden.dtype == self.head.dtype and self.head.dtype in (torch.bfloat16, torch.float16)

    def _panels(self, hidden: Tensor) -> list[slice]:
        rows, width = self.head.shape
        whole = self.head.dtype == self.dtype
        step = rows if whole else max(1, _PANEL_BYTES // (4 * width))
        return [slice(start, min(rows, start + step)) for start in range(0, rows, max(1, step))]

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes h [c, D]·Wᵀ into ``out`` [c, V]."""
        if self.native(hidden):
            torch.mm(hidden, self.head.t(), out_dtype=self.dtype, out=out)
            return
        hidden = hidden.to(self.dtype)
        for panel in self._panels(hidden):
            torch.mm(hidden, self.head[panel].to(self.dtype).t(), out=out[:, panel])

    def narrow(self, dz: Tensor, hidden: Tensor) -> Tensor:
        """dz as the two gradient GEMMs take it: rounded to the 16 bits of the head on a GPU, else itself."""
        return dz.to(self.head.dtype) if self.native(hidden) else dz

    def hidden_gradient(self, dz: Tensor, hidden: Tensor, accumulator: Tensor | None = None) -> Tensor:
        """dz [c, V] (from ``narrow``)·W → [c, D] in the dtype of the arithmetic, added to ``accumulator`` if given.

        On a GPU with 16-bit inputs and without an accumulator it is rounded as the GEMM writes it: that is the dtype
        in which it is reduced over ranks.
        """
        if self.native(hidden):
            if accumulator is None:
                return torch.mm(dz, self.head)
            return torch.addmm(accumulator, dz, self.head, out_dtype=torch.float32, out=accumulator)
        result = dz.new_empty((dz.shape[0], self.head.shape[1])) if accumulator is None else accumulator
        if self.head.shape[0] == 0:
            return result.zero_() if accumulator is None else result
        for panel in self._panels(hidden):
            beta = 0 if panel.start == 0 and accumulator is None else 1
            torch.addmm(result, dz[:, panel], self.head[panel].to(self.dtype), beta=beta, out=result)
        return result

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, accumulator: Tensor, first: bool) -> None:
        """accumulator [V, D] += dzᵀ·h, dz from ``narrow``; with ``first`` it is overwritten (it may hold garbage).

        The accumulator is of the dtype of the arithmetic, or a ``main_grad`` in the dtype of the head. The GEMM adds
        to it in float32 and rounds the sum once.
        """
        beta = 0 if first else 1
        if self.native(hidden) and accumulator.dtype == self.dtype:
            torch.addmm(accumulator, dz.t(), hidden, out_dtype=self.dtype, beta=beta, out=accumulator)
        elif self.native(hidden):
            torch.addmm(accumulator, dz.t(), hidden, beta=beta, out=accumulator)
        elif accumulator.dtype == self.dtype:
            torch.addmm(accumulator, dz.t(), hidden.to(self.dtype), beta=beta, out=accumulator)
        else:
            part = torch.mm(dz.t(), hidden.to(self.dtype))
            accumulator.add_(part) if beta else accumulator.copy_(part)
