"""Moving small tensors to the device of the arithmetic without stopping the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``; the host goes on at once.

    From CPU memory to a GPU it goes through pinned memory: a copy from pageable memory may wait for all work that was
    given to the GPU before, non-blocking or not. The allocator of pinned memory keeps the block until it is copied.
    """
    if tensor.device.type == "cpu" and device.type not in ("cpu", "meta"):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
