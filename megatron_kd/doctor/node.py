"""The checks of one node, made by its first rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from megatron_kd.cache.storage import is_url
from megatron_kd.cache.store import cache_exists
from megatron_kd.config import Recipe
from megatron_kd.device.probe import cuda_state, gpu_states
from megatron_kd.doctor.check import Check, attempt, not_needed
from megatron_kd.doctor.disk import check_locks, check_space, check_speed
from megatron_kd.doctor.gpus import check_gpus
from megatron_kd.doctor.inputs import check_visible, samples_of
from megatron_kd.doctor.limits import check_limits, read_limits
from megatron_kd.doctor.space import cache_bytes, checkpoint_bytes, nearest_folder
from megatron_kd.doctor.target import Target
from megatron_kd.doctor.versions import check_versions, installed

LOCAL_S = 60.0
"""What a check of local things may take before the file system behind it counts as hung."""


def check_node(target: Target, own: Iterable[int], *, quick: bool) -> list[Check]:
    """Everything that may differ from node to node.

    Args:
        own: ids of the doctor's ranks on this node.
    """
    ours = [os.getpid(), *own]
    checks = [
        *attempt(
            "versions", "repair the installation", LOCAL_S, lambda: check_versions(installed(), cuda_state(), target)
        ),
        *attempt("gpus", "look at nvidia-smi", LOCAL_S, lambda: check_gpus(gpu_states(), target, ours)),
        *attempt("limits", "look at ulimit -a", LOCAL_S, lambda: check_limits(read_limits(), target)),
    ]
    if target.recipe is None:
        return [*checks, not_needed("disk", "no recipe says where to write")]
    recipe = target.recipe
    checks += attempt("shared-paths", "mount it", LOCAL_S, lambda: check_visible(recipe))
    for check in _disk_checks(recipe, quick=quick):
        checks += check
    return checks


def _disk_checks(recipe: Recipe, *, quick: bool) -> Iterator[list[Check]]:
    """Of the folders that the recipe writes to; of one folder for two purposes, its speed once."""
    written = {nearest_folder(recipe.run_dir): [("checkpoints", checkpoint_bytes(recipe))]}
    location = recipe.teacher.cache
    if location is not None and not is_url(location) and recipe.teacher.mode == "offline":
        # A cache that is there is not written again; what is missing of it is for `capture` to say.
        if not cache_exists(location):
            needed = cache_bytes(recipe, samples_of(recipe))
            written.setdefault(nearest_folder(location), []).append(("the cache", needed))
    for folder, plans in written.items():
        what, needed = " and ".join(name for name, _ in plans), sum(size for _, size in plans)
        todo = f"check {folder} and its permissions, or choose another run_dir or teacher.cache"
        yield attempt("disk-space", todo, LOCAL_S, lambda f=folder, n=needed, w=what: check_space(f, n, w))
        yield attempt("file-locks", todo, LOCAL_S, lambda f=folder: check_locks(f))
        if not quick:
            yield attempt("disk-speed", todo, LOCAL_S, lambda f=folder: check_speed(f))
