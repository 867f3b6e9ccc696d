"""The only place that knows whether a CUDA device exists."""

from megatron_kd.device.faults import KeptFaults
from megatron_kd.device.heartbeats import Heartbeats
from megatron_kd.device.nsys import nsys_range
from megatron_kd.device.out_of_memory import (
    dump_memory_snapshot,
    is_out_of_memory,
    memory_figures,
    record_memory_history,
)
from megatron_kd.device.platform import (
    Moment,
    can_reset_peak_memory,
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
from megatron_kd.device.side_stream import SideStream, pinned_exactly
from megatron_kd.device.signals import StopOnSignal

__all__ = [
    "Heartbeats",
    "KeptFaults",
    "Moment",
    "SideStream",
    "StopOnSignal",
    "any_rank",
    "can_reset_peak_memory",
    "current_device",
    "describe_hardware",
    "destroy_distributed",
    "dump_memory_snapshot",
    "fail_together",
    "first_message",
    "first_rank_tells",
    "gather_arrays",
    "get_random_state",
    "host_buffer",
    "init_distributed",
    "is_cuda",
    "is_out_of_memory",
    "lost_ranks_reported",
    "memory_figures",
    "nsys_range",
    "on_any_rank",
    "peak_memory_bytes",
    "pinned_exactly",
    "record_memory_history",
    "reset_peak_memory",
    "select_device",
    "set_random_state",
    "sum_over_ranks",
    "synchronize",
]
