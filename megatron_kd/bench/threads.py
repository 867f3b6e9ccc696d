"""The threads that torch computes with on a CPU, for the time of a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Lets torch use so many threads within the block, as many as before with None; afterwards as many as before."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
