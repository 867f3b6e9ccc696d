"""The losses computed here, against the dense one in float64: value and gradients, every mode and form of the passes.

N tokens, D hidden, V vocabulary, K cached ids. Sizes are odd where they may be, so that shards are uneven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.device import current_device
from megatron_kd.losses import IMPLEMENTATIONS, dense_topk_divergence, passes
from megatron_kd.losses.eager_passes import EagerPasses
from megatron_kd.targets import TopKTargets

D, V, K = 48, 1009, 20
TOKENS_PER_RANK = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest difference to float64 on the same inputs, as a part of the largest number: float32 rounding leaves 1e-6,
products in TF32 1e-3, gradients rounded to bfloat16 4e-3."""
MODES = ("single_pass", "recompute", "frozen_head", "no_grad")


@dataclass(frozen=True)
class Layout:
    """The ranks that share the vocabulary. ``group`` is None for one rank."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

    def __str__(self) -> str:
        return f"TP {self.size}{' + SP' if self.sequence_parallel else ''}"


@dataclass(frozen=True)
class Differences:
    """The largest relative differences of one case, over value and gradients.

    Attributes:
        implementation: as in ``loss.implementation``.
        mode: as in ``loss.mode``.
        form: of the passes, ``eager`` or ``triton``.
    """

    implementation: str
    mode: str
    form: str
    value: float
    gradient: float

    @property
    def largest(self) -> float:
        """Of the two; what is not a number counts as infinite."""
        return max(math.inf if math.isnan(x) else x for x in (self.value, self.gradient))


@dataclass(frozen=True)
class _Inputs:
    hidden: Tensor
    weight: Tensor
    targets: TopKTargets
    token_weights: Tensor


def self_test(precision: str, layout: Layout) -> list[Differences]:
    """Every method in one arithmetic and layout. Collective over the layout's group; the same on all its ranks.

    Args:
        precision: a name in ``DTYPES``.
    """
    inputs = _inputs(DTYPES[precision], layout.size)
    expected = _run("dense", "auto", _in_double(inputs), Layout())
    found = []
    for form in _forms():
        with form_of_passes(form):
            for name, mode in _methods():
                value, gradient = _compare(_run(name, mode, inputs, layout), expected, layout)
                found.append(Differences(name, mode, form, value, gradient))
    return found


def _methods() -> Iterator[tuple[str, str]]:
    yield from (("fused", mode) for mode in MODES)
    yield "forward_chunked", "auto"
    yield "dense", "auto"


def _forms() -> list[str]:
    return list(dict.fromkeys([passes.passes_for(current_device()).name, "eager"]))


@contextmanager
def form_of_passes(name: str) -> Iterator[None]:
    """Lets the fused loss take the eager passes, on a GPU too, while entered."""
    chosen = passes.passes_for
    if name == "eager":
        passes.passes_for = lambda device: EagerPasses()
    try:
        yield
    finally:
        passes.passes_for = chosen


def _inputs(dtype: torch.dtype, ranks: int) -> _Inputs:
    """The same on every rank: made on the CPU from one seed."""
    random = torch.Generator().manual_seed(20)
    tokens = TOKENS_PER_RANK * ranks
    hidden = torch.randn(tokens, D, generator=random).to(dtype)
    weight = (torch.randn(V, D, generator=random) / D**0.5).to(dtype)
    teacher = torch.log_softmax(2 * torch.randn(tokens, V, generator=random).double(), dim=1)
    logprobs, ids = teacher.topk(K, dim=1)
    tail = torch.log1p(-logprobs.exp().sum(dim=1))
    weights = (torch.rand(tokens, generator=random) > 0.2).float() / tokens
    device = current_device()
    targets = TopKTargets(
        ids.to(device, torch.int32), logprobs.to(device, torch.float32), tail.to(device, torch.float32), 1.0
    )
    return _Inputs(hidden.to(device), weight.to(device), targets, weights.to(device))


def _in_double(inputs: _Inputs) -> _Inputs:
    t = inputs.targets
    targets = TopKTargets(t.ids, t.logprobs.double(), t.tail_logmass.double(), t.temperature)
    return _Inputs(inputs.hidden.double(), inputs.weight.double(), targets, inputs.token_weights.double())


def _run(name: str, mode: str, inputs: _Inputs, layout: Layout) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, dH of this rank's tokens, dW of its shard); None where the mode gives no gradient."""
    rows = -(-V // layout.size)
    start = layout.rank * rows
    shard = torch.nn.functional.pad(inputs.weight, (0, 0, 0, rows * layout.size - V))[start : start + rows]
    mine = slice(layout.rank * TOKENS_PER_RANK, (layout.rank + 1) * TOKENS_PER_RANK)
    hidden = (inputs.hidden[mine] if layout.sequence_parallel else inputs.hidden).clone()
    hidden.requires_grad_(mode != "no_grad")
    shard = shard.clone().requires_grad_(mode not in ("no_grad", "frozen_head"))
    divergence = dense_topk_divergence if name == "dense" else IMPLEMENTATIONS[name].topk
    out = divergence(
        hidden,
        shard,
        inputs.targets,
        inputs.token_weights,
        vocab_size=V,
        vocab_start=start,
        group=layout.group,
        sequence_parallel=layout.sequence_parallel,
        mode=mode,
        # Some four chunks, so that what is carried from one to the next is tried as well.
        chunk_bytes=6 * rows * 4 * layout.size,
    )
    if mode != "no_grad":
        out.loss.backward()
    return out.loss.detach(), hidden.grad, shard.grad


def _compare(
    got: tuple[Tensor, Tensor | None, Tensor | None],
    expected: tuple[Tensor, Tensor | None, Tensor | None],
    layout: Layout,
) -> tuple[float, float]:
    """(of the value, of the gradients)"""
    loss, hidden, weight = expected
    assert hidden is not None and weight is not None
    rows = -(-V // layout.size)
    start = layout.rank * rows
    if layout.sequence_parallel:
        hidden = hidden[layout.rank * TOKENS_PER_RANK :][:TOKENS_PER_RANK]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, rows * layout.size - V))
    pairs = [(got[1], hidden), (got[2], padded[start : start + rows])]
    gradient = max((_difference(ours, theirs) for ours, theirs in pairs if ours is not None), default=0.0)
    return _difference(got[0], loss), gradient


def _difference(ours: Tensor, theirs: Tensor) -> float:
    scale = float(theirs.abs().max())
    return float((ours.double() - theirs).abs().max()) / (scale or 1.0)


def make_layouts(world: int, rank: int, tp: int) -> list[Layout]:
    """The layouts to try: groups of ``tp`` neighbours, with sequence parallelism and without. Collective over all."""
    if tp == 1:
        return [Layout()]
    mine = None
    for first in range(0, world, tp):
        group = dist.new_group(list(range(first, first + tp)))
        if first <= rank < first + tp:
            mine = group
    return [Layout(mine, rank % tp, tp, sequence_parallel) for sequence_parallel in (False, True)]
