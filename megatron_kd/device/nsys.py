"""Marks for Nsight Systems. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nsys_range(*, record_shapes: bool = False) -> Iterator[None]:
    """Has ``nsys profile --capture-range=cudaProfilerApi`` record while entered; operators and phases become ranges."""
    torch.cuda.profiler.start()
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=record_shapes):
            yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
