"""Which device this process computes on, and what it can tell about itself."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Sequence

import torch

from megatron_kd.errors import ConfigError

CPU_NAME = "cpu"
_CLEAR_REFS = "/proc/self/clear_refs"
_selected: torch.device | None = None


def select_device(gpu: str) -> torch.device:
    """Chooses the device of this process, once, before anything of Megatron-Core is built.

    Args:
        gpu: the recipe's ``cluster.gpu``. ``cpu`` applies the CPU workarounds; anything else names a GPU model and
            takes the CUDA device of ``LOCAL_RANK``.

    Raises:
        ConfigError: a GPU is wanted and none is there, or another device was chosen before.
    """
    global _selected
    if gpu == CPU_NAME:
        chosen = torch.device("cpu")
    elif not torch.cuda.is_available():
        raise ConfigError(
            f"cluster.gpu is {gpu!r}, but this process sees no CUDA device; run it on a GPU node or set cluster.gpu=cpu"
        )
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
                "lower cluster.gpus_per_node or the ranks per node"
            )
        chosen = torch.device("cuda", local_rank)
    if _selected is not None and _selected.type != chosen.type:
        raise ConfigError(f"this process already runs on {_selected}; it cannot change to {chosen}")
    if chosen.type == "cpu":
        from megatron_kd.device.cpu_megatron import apply_cpu_workarounds

        apply_cpu_workarounds()
    else:
        from megatron_kd.device.group_step_adam import install_group_step_adam

        torch.cuda.set_device(chosen)
        install_group_step_adam()
    _selected = chosen
    return chosen


def current_device() -> torch.device:
    """The chosen device; the CPU as long as none was chosen."""
    return _selected if _selected is not None else torch.device("cpu")


def is_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return current_device().type == "cuda"


def synchronize() -> None:
    """Waits until the device has finished; nothing to do on the CPU."""
    if is_cuda():
        torch.cuda.synchronize()


def host_buffer(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in CPU memory for what goes to the device next.

    Where there is a CUDA device it is pinned: only from there does a copy run beside the host and other work. May be
    called from any thread.
    """
    if not is_cuda():
        return torch.empty(tuple(shape), dtype=dtype)
    with torch.cuda.device(current_device()):  # a new thread would open a context on the first device of the machine
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class Moment:
    """A point in the work of this process: an event on the device's current stream, on the CPU the clock."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock = time.perf_counter()

    @staticmethod
    def now() -> Moment:
        """This point. Does not wait for the device."""
        moment = Moment()
        if is_cuda():
            moment._event = torch.cuda.Event(enable_timing=True)
            moment._event.record()
        return moment

    def seconds_until(self, later: Moment) -> float:
        """Seconds from here to a later point, both of which the device has reached."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1e3
        return later._clock - self._clock


def can_reset_peak_memory() -> bool:
    """Whether ``reset_peak_memory`` does something: on a GPU, and on Linux where a process may reset its own mark."""
    return is_cuda() or os.access(_CLEAR_REFS, os.W_OK)


def reset_peak_memory() -> None:
    """Starts a new measurement of the peak."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
    elif os.access(_CLEAR_REFS, os.W_OK):
        # Linux resets the high-water mark of the resident set on a 5; see proc(5).
        with open(_CLEAR_REFS, "w") as file:
            file.write("5")


def peak_memory_bytes() -> int:
    """Bytes at the peak since the last reset: allocated on a GPU, the resident set of the process on the CPU."""
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:  # not Linux: the peak of the whole process, which cannot be reset
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_hardware() -> dict[str, object]:
    """What the run directory keeps of this machine: no names or addresses."""
    described: dict[str, object] = {
        "device": str(current_device().type),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if is_cuda():
        properties = torch.cuda.get_device_properties(current_device())
        described |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return described
