"""What the driver tells about the GPUs of this node, asked without taking memory on any of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_MIB = 2**20


@dataclass(frozen=True)
class GpuState:
    """One GPU that this process may use.

    Attributes:
        free_bytes: None where nvidia-smi does not tell.
        processes: ids of what computes on it, this process and its peers included; None likewise.
    """

    name: str
    total_bytes: int
    free_bytes: int | None = None
    processes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CudaState:
    """The CUDA of torch and of the driver.

    Attributes:
        built_for: the CUDA version torch was built for; None in a build for CPUs.
        driver: the newest CUDA version that the driver runs, as (major, minor); None where there is no driver.
        available: whether torch can compute on a GPU.
        cudnn: as torch counts it, 91301 for 9.13.1; None without.
    """

    built_for: str | None
    driver: tuple[int, int] | None
    available: bool
    cudnn: int | None


def cuda_state() -> CudaState:
    """Asks torch and the driver."""
    number = int(torch._C._cuda_getDriverVersion()) if hasattr(torch._C, "_cuda_getDriverVersion") else 0
    return CudaState(
        built_for=torch.version.cuda,
        driver=(number // 1000, number % 1000 // 10) if number else None,
        available=torch.cuda.is_available(),
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,
    )


def gpu_states() -> list[GpuState]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order."""
    if not torch.cuda.is_available():
        return []
    free = _csv("--query-gpu=uuid,memory.free")
    busy = _csv("--query-compute-apps=gpu_uuid,pid")
    return [
        join_states(properties.name, properties.total_memory, f"GPU-{properties.uuid}", free, busy)
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def join_states(
    name: str, total: int, uuid: str, free: Mapping[str, list[str]] | None, busy: Mapping[str, list[str]] | None
) -> GpuState:
    """One GPU as torch describes it, with what nvidia-smi adds: by UUID the free MiB, and process ids."""
    told = [value for value in (free or {}).get(uuid, []) if value.isdigit()]
    return GpuState(
        name=name,
        total_bytes=total,
        free_bytes=int(told[0]) * _MIB if told else None,
        processes=None if busy is None else tuple(int(pid) for pid in busy.get(uuid, []) if pid.isdigit()),
    )


def parse_csv(text: str) -> dict[str, list[str]]:
    """nvidia-smi's ``uuid, value`` lines: all values of each UUID."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        uuid, comma, value = line.partition(",")
        if comma:
            values.setdefault(uuid.strip(), []).append(value.strip())
    return values


def _csv(query: str) -> dict[str, list[str]] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_csv(done.stdout)
