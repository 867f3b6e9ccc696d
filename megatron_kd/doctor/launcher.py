"""Which rank this process is: as torchrun says it, or as srun does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import MutableMapping

from megatron_kd.errors import LaunchError

_FIRST_PORT, _PORTS = 20000, 10000


def adopt_slurm_ranks(environ: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a task that srun started.

    Nothing is changed under torchrun, and in a batch script, whose own shell is no task of a step.

    Raises:
        LaunchError: nothing tells the first node's address.
    """
    if "RANK" in environ or "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return
    world = int(environ["SLURM_STEP_NUM_TASKS"])
    if world == 1:
        return
    environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], str(world)
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    # Two steps of one job must not meet.
    number = int(environ.get("SLURM_JOB_ID", "0")) + 7 * int(environ.get("SLURM_STEP_ID", "0"))
    environ.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _PORTS))
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _address(first_host(environ.get("SLURM_STEP_NODELIST", "")))


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: ``n[03-05,9],m1`` → ``n03``.

    Raises:
        LaunchError: the list is empty.
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?([^\[,\]]*)", nodes)
    if match is None:
        raise LaunchError("SLURM_STEP_NODELIST is empty: set MASTER_ADDR to the first node's address")
    suffix = re.match(r"[^\[]*\[[^\]]*\]([^,\[]*)", nodes)
    return match[1] + (match[2] or "") + (suffix[1] if suffix is not None and match[2] else "")


def _address(host: str) -> str:
    """Of a node: what SLURM knows (names need not resolve), else its name. In a container scontrol is missing."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", "-o", host], check=True, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return host
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found is not None else host


def node_name() -> str:
    """Of this machine, in SLURM's words where it is one of its nodes."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
