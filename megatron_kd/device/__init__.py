"""The only place that knows whether a CUDA device exists."""

from megatron_kd.device.faults import KeptFaults
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
    first_message,
    first_rank_tells,
    gather_arrays,
    init_distributed,
    lost_ranks_reported,
    on_any_rank,
    sum_over_ranks,
)
from megatron_kd.device.random_state import get_random_state, set_random_state
from megatron_kd.device.signals import StopOnSignal

__all__ = [
    "KeptFaults",
    "StopOnSignal",
    "any_rank",
    "current_device",
    "describe_hardware",
    "destroy_distributed",
    "fail_together",
    "first_message",
    "first_rank_tells",
    "gather_arrays",
    "get_random_state",
    "host_buffer",
    "init_distributed",
    "is_cuda",
    "lost_ranks_reported",
    "on_any_rank",
    "peak_memory_bytes",
    "reset_peak_memory",
    "select_device",
    "set_random_state",
    "sum_over_ranks",
    "synchronize",
]
