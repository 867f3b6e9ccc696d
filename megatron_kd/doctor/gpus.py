"""The GPUs of a node: how many, which, and whether they are free."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from megatron_kd.device.probe import GpuState
from megatron_kd.doctor.check import Check, fail, not_needed, ok, warn
from megatron_kd.doctor.target import Target

_GIB = 2**30
BUSY = 0.10
"""Share of a GPU's memory that may be taken before a run is warned; a CUDA context takes below one percent."""


def check_gpus(gpus: Sequence[GpuState], target: Target, own: Sequence[int] = ()) -> list[Check]:
    """Judges the GPUs of this node.

    Args:
        own: ids of the doctor's own ranks on this node.
    """
    if not target.wants_gpu:
        return [not_needed("gpus", target.why_cpu)]
    return [_count(gpus, target), _names(gpus, target), *_memory(gpus, target, own)] if gpus else [_none(target)]


def _none(target: Target) -> Check:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    return fail(
        "gpus", f"none is seen{where}, cluster.gpu is {target.gpu}", "run on a GPU node, or set cluster.gpu=cpu"
    )


def _count(gpus: Sequence[GpuState], target: Target) -> Check:
    names = ", ".join(f"{number} × {name}" for name, number in Counter(gpu.name for gpu in gpus).items())
    if len(gpus) < target.gpus_per_node:
        return fail(
            "gpus",
            f"{names}, cluster.gpus_per_node is {target.gpus_per_node}",
            "ask for all GPUs of the node (--gpus-per-node), or lower cluster.gpus_per_node",
        )
    return ok("gpus", names)


def _names(gpus: Sequence[GpuState], target: Target) -> Check:
    other = sorted({gpu.name for gpu in gpus if target.gpu not in gpu.name.lower().replace(" ", "")})
    if target.recipe is None or not other:
        return ok("gpu-model", "as in the recipe" if target.recipe else "no recipe to compare with")
    return warn(
        "gpu-model",
        f"{', '.join(other)}, cluster.gpu is {target.gpu}",
        "correct cluster.gpu: memory and speed are planned with it",
    )


def _memory(gpus: Sequence[GpuState], target: Target, own: Sequence[int]) -> list[Check]:
    gpus = gpus[: target.gpus_per_node] if target.recipe is not None else gpus
    known = [(i, gpu, gpu.free_bytes) for i, gpu in enumerate(gpus) if gpu.free_bytes is not None]
    if len(known) < len(gpus):
        return [warn("gpu-memory", "not known: nvidia-smi does not tell", "make nvidia-smi callable here")]
    taken = [(i, gpu, free) for i, gpu, free in known if free < (1 - BUSY) * gpu.total_bytes]
    least = min(free for _, _, free in known)
    # Inside a container the ids are those of the host, and the doctor's own processes cannot be told from others.
    others = {pid for gpu in gpus for pid in gpu.processes or ()} - set(own)
    visible = sorted(pid for pid in others if os.path.exists(f"/proc/{pid}"))
    if taken:
        i, gpu, free = taken[0]
        who = f", processes {', '.join(map(str, visible))}" if visible else ""
        return [
            fail(
                "gpu-memory",
                f"GPU {i} has {free / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free{who}",
                "end what runs there (nvidia-smi), or take another node",
            )
        ]
    if visible:
        return [warn("gpu-memory", f"processes {', '.join(map(str, visible))} use these GPUs", "end them: nvidia-smi")]
    return [ok("gpu-memory", f"at least {least / _GIB:.1f} GiB free on each")]
