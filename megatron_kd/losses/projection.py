"""The three GEMMs of a language-model head, with float32 accuracy from 16-bit inputs.

c tokens in a chunk, D hidden, V the true vocabulary rows of this rank's shard, Vl all its rows (V and padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of a 16-bit head, this much is widened to float32 at a time (and of dW, this much is added at a time on a GPU).
_PANEL_BYTES = 16 << 20


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


class Projection:
    """logits = h·Wᵀ and its two gradients over the first ``rows`` rows of a head, the padding left out.

    Logits are computed and returned in ``dtype`` (float32; float64 for float64 inputs): rounding them to bfloat16
    would cost 1 % of the gradient and more at large logits. On a GPU with 16-bit inputs the GEMM itself writes
    float32 and only dz is rounded for the two gradient GEMMs; elsewhere 16-bit inputs are widened panel by panel.
    """

    def __init__(self, weight: Tensor, rows: int, dtype: torch.dtype) -> None:
        self.head = weight.detach()[:rows]
        self.dtype = dtype

    def _native(self, hidden: Tensor) -> bool:
        """Whether the GEMM takes 16-bit inputs and writes float32."""
        return hidden.is_cuda and hidden.dtype == self.head.dtype and self.head.dtype in (torch.bfloat16, torch.float16)

    def _panels(self, hidden: Tensor) -> list[slice]:
        rows, width = self.head.shape
        whole = self.head.dtype == self.dtype
        step = rows if whole else max(1, _PANEL_BYTES // (4 * width))
        return [slice(start, min(rows, start + step)) for start in range(0, rows, max(1, step))]

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes h [c, D]·Wᵀ into ``out`` [c, V]."""
        if self._native(hidden):
            torch.mm(hidden, self.head.t(), out_dtype=self.dtype, out=out)
            return
        hidden = hidden.to(self.dtype)
        for panel in self._panels(hidden):
            torch.mm(hidden, self.head[panel].to(self.dtype).t(), out=out[:, panel])

    def hidden_gradient(self, dz: Tensor, hidden: Tensor) -> Tensor:
        """dz [c, V]·W → [c, D], in the dtype in which it should be reduced over ranks."""
        if self._native(hidden):
            return torch.mm(dz.to(self.head.dtype), self.head)
        result = dz.new_zeros((dz.shape[0], self.head.shape[1]))
        for panel in self._panels(hidden):
            result.addmm_(dz[:, panel], self.head[panel].to(self.dtype))
        return result

    def add_weight_gradient(self, dz: Tensor, hidden: Tensor, accumulator: Tensor, first: bool) -> None:
        """accumulator [V, D] += dzᵀ·h; with ``first`` it is overwritten instead (its content may be garbage)."""
        beta = 0 if first else 1
        if self._native(hidden):
            narrow = dz.to(self.head.dtype)
            step = max(1, _PANEL_BYTES // (4 * self.head.shape[1]))
            for start in range(0, self.head.shape[0], step):
                panel = slice(start, start + step)
                part = torch.mm(narrow[:, panel].t(), hidden, out_dtype=torch.float32)
                accumulator[panel].mul_(beta).add_(part) if beta else accumulator[panel].copy_(part)
        elif accumulator.dtype == self.dtype:
            torch.addmm(accumulator, dz.t(), hidden.to(self.dtype), beta=beta, out=accumulator)
        else:
            part = torch.mm(dz.t(), hidden.to(self.dtype))
            accumulator.add_(part) if beta else accumulator.copy_(part)
