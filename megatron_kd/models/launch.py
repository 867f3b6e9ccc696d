"""The start of every distributed command: count the ranks, choose the device, join the groups."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch

from megatron_kd.config import Recipe
from megatron_kd.config.world import check_world_size
from megatron_kd.device import init_distributed, select_device
from megatron_kd.models.parallel import ParallelGroups, init_model_parallel


def usable_cores() -> int:
    """Cores this process may run on; all of them where the system does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(recipe: Recipe) -> None:
    """Shares the cores of this machine among its ranks, unless the recipe or OMP_NUM_THREADS says how many.

    torchrun sets OMP_NUM_THREADS to 1 where nobody did: among several ranks a 1 says nothing.
    """
    threads = recipe.training.threads
    asked = os.environ.get("OMP_NUM_THREADS")
    if threads is None and (asked is None or (asked == "1" and recipe.world_size > 1)):
        threads = max(1, usable_cores() // recipe.cluster.gpus_per_node)
    if threads is not None:
        torch.set_num_threads(threads)


def join_ranks(recipe: Recipe) -> ParallelGroups:
    """Makes this process one rank of the recipe's layout: device, threads, process groups, seeds. Collective.

    Raises:
        LaunchError: started with another number of ranks than the recipe needs.
        ConfigError: the recipe wants a GPU and there is none.
    """
    check_world_size(recipe, sys.argv[1:])
    select_device(recipe.cluster.gpu)
    set_threads(recipe)
    timeout = timedelta(minutes=recipe.training.distributed_timeout_minutes)
    init_distributed(timeout)
    return init_model_parallel(recipe.parallelism, recipe.seed, timeout)
