"""Copies from the host's memory beside the computation. On the CPU they take place at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_kd.device.platform import is_cuda
from megatron_kd.errors import KDError


class SideStream:
    """A second stream of this process's device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if is_cuda() else None

    @contextmanager
    def copies(self) -> Iterator[None]:
        """What is copied within runs beside the device's other work, but after all that was asked of it before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Callable[[], None]:
        """A function that makes the caller's stream, not the host, wait for the copies asked for so far."""
        if self._stream is None:
            return lambda: None
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


def pinned_exactly(size: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [size] in the host's memory, pinned where this process computes on CUDA; keep the tensor.

    torch's own pinned memory is rounded up to a power of two: of a large model's weights nearly twice as much.

    Raises:
        KDError: the system does not pin so much (``ulimit -l``, a container's limit).
    """
    buffer = torch.empty(size, dtype=dtype)
    if is_cuda() and size:
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        if int(error) != 0:
            raise KDError(
                f"{buffer.nbytes / 2**30:.1f} GiB of the host's memory cannot be pinned (CUDA error {int(error)}): "
                "raise the job's memory or its limit of locked memory (ulimit -l), or set teacher.offload to false"
            )
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer
