"""The only place that knows whether a CUDA device exists."""

from megatron_kd.device.platform import (
    current_device,
    describe_hardware,
    host_buffer,
    is_cuda,
    peak_memory_bytes,
    reset_peak_memory,
    select_device,
    synchronize,
)
from megatron_kd.device.process_group import (
    any_rank,
    destroy_distributed,
    fail_together,
    init_distributed,
    on_any_rank,
)
from megatron_kd.device.random_state import get_random_state, set_random_state

__all__ = [
    "any_rank",
    "current_device",
    "describe_hardware",
    "destroy_distributed",
    "fail_together",
    "get_random_state",
    "host_buffer",
    "init_distributed",
    "is_cuda",
    "on_any_rank",
    "peak_memory_bytes",
    "reset_peak_memory",
    "select_device",
    "set_random_state",
    "synchronize",
]
