"""Running out of memory: told from other errors, with the figures of the moment and a snapshot of what was held."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_kd.device.platform import current_device, is_cuda, peak_memory_bytes

# What torch and the CUDA libraries say when an allocation fails without an OutOfMemoryError of its own.
_SAYINGS = ("defaultcpuallocator", "out of memory", "cublas_status_alloc_failed")
_GIB = 2**30
_EVENTS = 200_000


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error).lower() for saying in _SAYINGS)


def memory_figures() -> str:
    """Peak, allocated, reserved and total of the device in GiB; of the CPU the peak of the process."""
    peak = peak_memory_bytes() / _GIB
    if not is_cuda():
        return f"peak {peak:.2f} GiB of the process"
    allocated = torch.cuda.memory_allocated() / _GIB
    reserved = torch.cuda.memory_reserved() / _GIB
    total = torch.cuda.get_device_properties(current_device()).total_memory / _GIB
    return f"peak {peak:.1f}, allocated {allocated:.1f}, reserved {reserved:.1f} of {total:.1f} GiB"


def record_memory_history() -> bool:
    """Has the allocator remember who asked for what. Only on CUDA; False where there is nothing to record."""
    if not is_cuda():
        return False
    torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
    return True


def dump_memory_snapshot(path: Path) -> None:
    """Writes what was recorded, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))
