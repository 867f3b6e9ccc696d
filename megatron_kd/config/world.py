"""Whether a process was started among as many ranks as its recipe needs; answered without torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from megatron_kd.config.layout import ClusterConfig
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import LaunchError


def torchrun_line(cluster: ClusterConfig, arguments: Sequence[str]) -> str:
    """The command that starts the same work on the ranks a recipe asks for, ready for a shell.

    With several nodes it is run on each of them: NODE_RANK counts them from 0, MASTER_ADDR is the first one's address.
    """
    command = f"megatron-kd {shlex.join(arguments)}"
    if cluster.world_size == 1:
        return command
    nodes = "--standalone"
    if cluster.nodes > 1:
        nodes = f'--nnodes {cluster.nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
    return f"torchrun --no-python {nodes} --nproc-per-node {cluster.gpus_per_node} {command}"


def check_world_size(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Compares ``WORLD_SIZE`` (1 without a launcher) with the recipe.

    Args:
        arguments: of the command line, without the program.

    Raises:
        LaunchError: with the command line that would be right.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != recipe.world_size:
        needed = f"cluster.nodes {recipe.cluster.nodes} × cluster.gpus_per_node {recipe.cluster.gpus_per_node}"
        where = "run on every node" if recipe.cluster.nodes > 1 else "run"
        raise LaunchError(
            f"the recipe {recipe.name!r} needs {_ranks(recipe.world_size)} ({needed}), {world} started; {where}: "
            + torchrun_line(recipe.cluster, arguments)
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
