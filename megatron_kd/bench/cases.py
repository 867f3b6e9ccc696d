"""What is measured of our own: the floor, and every implementation in every mode.

N tokens, D hidden, V vocabulary, P = 2·N·D·V FLOP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.bench.inputs import LossInputs
from megatron_kd.losses import IMPLEMENTATIONS

FLOOR = ("floor", "")
# Implementation and mode. The two references know no modes.
OWN = (
    ("fused", "single_pass"),
    ("fused", "recompute"),
    ("fused", "frozen_head"),
    ("fused", "no_grad"),
    ("forward_chunked", ""),
    ("dense", ""),
)
# The floor's logits are cut into slices of rows above this size, so that it can be measured where [N, V] does not fit
# beside the inputs. A slice of this size is still so large a GEMM that its efficiency is that of the whole.
FLOOR_SLICE_BYTES = 4 << 30

Pass = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One implementation and mode.

    Attributes:
        prepare: makes what a pass needs beyond the shared inputs, and returns the pass. Neither timed nor counted.
        peer: not ours: whatever it raises is a remark on the result rather than an error.
    """

    implementation: str
    mode: str
    prepare: Callable[[], Pass]
    peer: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.implementation} {self.mode}".rstrip()


def own_cases(inputs: LossInputs, chunk_bytes: int) -> list[Case]:
    """The floor, then ours.

    Args:
        chunk_bytes: budget of the chunk buffers.
    """

    def case(implementation: str, mode: str) -> Case:
        method = IMPLEMENTATIONS[implementation].topk

        def loss(hidden: Tensor, head: Tensor) -> Tensor:
            return method(
                hidden,
                head,
                inputs.targets,
                inputs.token_weights,
                vocab_size=inputs.vocab,
                mode=mode or "auto",
                chunk_bytes=chunk_bytes,
            ).loss

        run = training_pass(
            inputs, loss, hidden_trains=mode != "no_grad", head_trains=mode not in ("no_grad", "frozen_head")
        )
        return Case(implementation, mode, lambda: run)

    floor = floor_pass(inputs)
    return [Case(*FLOOR, lambda: floor), *(case(*names) for names in OWN)]


def training_pass(inputs: LossInputs, loss: Loss, *, hidden_trains: bool = True, head_trains: bool = True) -> Pass:
    """Forward and, where anything trains, backward of a scalar loss of (hidden [N, D], head [V, D])."""

    def run() -> None:
        hidden = inputs.hidden.detach().requires_grad_(hidden_trains)
        head = inputs.head.detach().requires_grad_(head_trains)
        value = loss(hidden, head)
        if value.requires_grad:
            value.backward()

    return run


def floor_rows(tokens: int, vocab: int, itemsize: int, slice_bytes: int = FLOOR_SLICE_BYTES) -> int:
    """Rows in a slice of the floor: all of them unless [N, V] is larger than ``slice_bytes``, then an even share."""
    slices = -(-tokens * vocab * itemsize // slice_bytes)
    return -(-tokens // slices)


def floor_pass(inputs: LossInputs, slice_bytes: int = FLOOR_SLICE_BYTES) -> Pass:
    """Three bare GEMMs, below which no exact gradient can go: logits, dH of them, dW of them. 3P FLOP."""
    hidden, head = inputs.hidden, inputs.head
    rows = floor_rows(inputs.tokens, inputs.vocab, hidden.element_size(), slice_bytes)

    def run() -> None:
        hidden_gradient, head_gradient = torch.empty_like(hidden), torch.empty_like(head)
        for start in range(0, inputs.tokens, rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ head.t()
            torch.mm(logits, head, out=hidden_gradient[part])
            if start == 0:
                torch.mm(logits.t(), hidden[part], out=head_gradient)
            else:
                head_gradient.addmm_(logits.t(), hidden[part])

    return run
