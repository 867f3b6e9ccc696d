"""The start of every distributed command: count the ranks, choose the device, join the groups."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch

from megatron_kd.config import ClusterConfig, Recipe
from megatron_kd.device import init_distributed, select_device
from megatron_kd.device.process_group import world_size_from_environment
from megatron_kd.errors import LaunchError
from megatron_kd.models.parallel import ParallelGroups, init_model_parallel


def torchrun_line(cluster: ClusterConfig, arguments: list[str]) -> str:
    """The command that starts the same work on the ranks a recipe asks for."""
    nodes = f"--nnodes {cluster.nodes} " if cluster.nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.gpus_per_node} --no-python megatron-kd {' '.join(arguments)}"


def check_world_size(recipe: Recipe) -> None:
    """Raises LaunchError, with the right command line, where this process has not as many peers as the recipe says."""
    world = world_size_from_environment()
    if world != recipe.world_size:
        needed = f"cluster.nodes {recipe.cluster.nodes} × cluster.gpus_per_node {recipe.cluster.gpus_per_node}"
        raise LaunchError(
            f"the recipe {recipe.name!r} needs {recipe.world_size} ranks ({needed}), {world} started; run: "
            + torchrun_line(recipe.cluster, sys.argv[1:])
        )


def set_threads(recipe: Recipe) -> None:
    """Shares the cores of this machine among its ranks, unless the recipe or OMP_NUM_THREADS says how many."""
    threads = recipe.training.threads
    if threads is None and ("OMP_NUM_THREADS" not in os.environ or recipe.world_size > 1):
        threads = max(1, len(os.sched_getaffinity(0)) // recipe.cluster.gpus_per_node)
    if threads is not None:
        torch.set_num_threads(threads)


def join_ranks(recipe: Recipe, timeout: timedelta = timedelta(minutes=10)) -> ParallelGroups:
    """Makes this process one rank of the recipe's layout: device, threads, process groups, seeds. Collective.

    Raises:
        LaunchError: started with another number of ranks than the recipe needs.
        ConfigError: the recipe wants a GPU and there is none.
    """
    check_world_size(recipe)
    select_device(recipe.cluster.gpu)
    set_threads(recipe)
    init_distributed(timeout)
    return init_model_parallel(recipe.parallelism, recipe.seed, timeout)
