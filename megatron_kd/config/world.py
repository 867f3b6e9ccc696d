"""Whether a process was started among as many ranks as its recipe needs; answered without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_kd.config.layout import ClusterConfig
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import LaunchError


def torchrun_line(cluster: ClusterConfig, arguments: Sequence[str]) -> str:
    """The command that starts the same work on the ranks a recipe asks for."""
    nodes = f"--nnodes {cluster.nodes} " if cluster.nodes > 1 else ""
    return f"torchrun --no-python {nodes}--nproc-per-node {cluster.gpus_per_node} megatron-kd {' '.join(arguments)}"


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
        raise LaunchError(
            f"the recipe {recipe.name!r} needs {recipe.world_size} ranks ({needed}), {world} started; run: "
            + torchrun_line(recipe.cluster, arguments)
        )
