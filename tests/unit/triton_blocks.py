"""What the tests of the Triton passes look at: blocks of logits of every kind, and how exact a result must be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_kd.losses.passes import Scaling


@dataclass(frozen=True)
class Block:
    """What a test draws: a block of raw logits in a wider buffer, and how it is looked at."""

    n: int
    V: int
    block: int
    dtype: torch.dtype
    scaling: Scaling
    hidden: str
    with_ce: bool
    kind: str
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def logits(self, rng: torch.Generator) -> Tensor:
        """[n, V] float64 whose numbers are exact in ``dtype``."""
        x = torch.randn(self.n, self.V, generator=rng, dtype=torch.float64) * 3
        if self.kind == "extreme":
            x = 80.0 * x.sign() + x
        elif self.kind == "tails":
            x = torch.where(torch.rand(x.shape, generator=rng, dtype=torch.float64) < 0.7, -140.0, 0.0) + x
        elif self.kind == "offset":
            x = x + 1e3 * torch.randn(self.n, 1, generator=rng, dtype=torch.float64).sign()
        return x.to(self.dtype).double()

    def slots(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """(columns, owned) [n, K]: distinct where owned, column 0 where not."""
        owned_slots = {"none": 0, "some": min(self.V, 3), "all": self.V}[self.hidden]
        columns = torch.zeros(self.n, owned_slots + 2, dtype=torch.int64)
        owned = torch.zeros(self.n, owned_slots + 2, dtype=torch.bool)
        for row in range(self.n):
            places = torch.randperm(owned_slots + 2, generator=rng)[:owned_slots]
            columns[row, places] = torch.randperm(self.V, generator=rng)[:owned_slots]
            owned[row, places] = True
        return columns, owned

    def rows(self, rng: torch.Generator) -> Tensor:
        """[n] float64, exact in ``dtype``."""
        return torch.randn(self.n, generator=rng, dtype=torch.float64).to(self.dtype).double()

    def given(self, *values: Tensor) -> list[Tensor]:
        return [value.to(self.dtype) for value in values]


def make_blocks() -> list[Block]:
    """Every kind of logits at every scaling, all else in turn; then shapes at the edge, and one of the real step."""
    made = []
    scalings = [Scaling(1.0, None), Scaling(1.7, 5.0), Scaling(3.0, None), Scaling(1.0, 5.0)]
    for number, (kind, scaling) in enumerate(product(["plain", "extreme", "tails", "offset"], scalings)):
        dtype = torch.float64 if number % 5 == 0 else torch.float32
        hidden = ["some", "none", "all"][number // 2 % 3]
        step = [32, 64][number // 3 % 2]
        made.append(Block(2, [150, 64, 71][number % 3], step, dtype, scaling, hidden, number % 4 < 2, kind, number))
    for number, (n, V) in enumerate([(0, 9), (3, 0), (0, 0), (1, 1), (3, 7)]):
        scaling = Scaling(1.7, 5.0 if number % 2 else None)
        made.append(Block(n, V, 16, torch.float32, scaling, "all", True, "plain", number))
    made.append(Block(2, 5003, 4096, torch.float32, Scaling(1.7, 5.0), "some", True, "plain", 5))
    return made


every_block = pytest.mark.parametrize(
    "block", make_blocks(), ids=lambda b: f"{b.n}x{b.V}-{b.kind}-{b.scaling.temperature}-{b.scaling.softcap}"
)


class Buffer:
    """Logits as rows of a wider buffer, whose other columns must stay as they are."""

    MARK = 7.0

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        self.whole = torch.full((values.shape[0], values.shape[1] + 5), self.MARK, dtype=dtype)
        self.view = self.whole[:, 2 : 2 + values.shape[1]]
        self.view.copy_(values)

    def take(self) -> Tensor:
        outside = torch.cat([self.whole[:, :2], self.whole[:, 2 + self.view.shape[1] :]], dim=1)
        assert (outside == self.MARK).all(), "columns outside the block were written"
        return self.view.double()


def z_of(x: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """(z, dy/dx) in float64."""
    if scaling.softcap is None:
        return x / scaling.temperature, torch.ones_like(x)
    y = scaling.softcap * torch.tanh(x / scaling.softcap)
    return y / scaling.temperature, 1 - torch.tanh(x / scaling.softcap) ** 2


def tolerance(dtype: torch.dtype, *values: Tensor) -> float:
    """The rounding of z is relative to its size, that of exp(z) is the absolute one of z."""
    largest = max((float(v[v.isfinite()].abs().amax()) for v in values if v.isfinite().any()), default=0.0)
    return 8 * torch.finfo(dtype).eps * (largest + 4)


def assert_within(got: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    """|got − expected| ≤ allowed, and infinite where expected is."""
    same = got == expected
    error = torch.where(same, 0.0, (got - expected).abs())
    # What lies below the normal numbers may be flushed to 0.
    excess = error - allowed - 1e-37
    assert (excess <= 0).all(), (got[excess > 0], expected[excess > 0], excess.max())
