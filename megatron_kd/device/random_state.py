"""All random states of this rank, to be kept in a checkpoint and put back."""

from __future__ import annotations

from typing import Any

import torch

from megatron_kd.device.platform import is_cuda


def get_random_state() -> dict[str, Any]:
    """The generators of the CPU and of the device, and Megatron-Core's tensor-parallel states where they are forked.

    On the CPU they are not (see ``cpu_megatron``), so that there is nothing more to keep.
    """
    state: dict[str, Any] = {"cpu": torch.random.get_rng_state()}
    if is_cuda():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        state |= {"cuda": torch.cuda.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Puts back what ``get_random_state`` gave on a device of the same kind; other parts are left alone."""
    torch.random.set_rng_state(state["cpu"])
    if is_cuda() and "cuda" in state:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(state["cuda"])
        get_cuda_rng_tracker().set_states(state["tracker"])
