"""The checks of one node, made by its first rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from megatron_kd.cache.storage import is_url
from megatron_kd.cache.store import cache_exists
from megatron_kd.config import Recipe
from megatron_kd.device.probe import cuda_state, gpu_states
from megatron_kd.doctor.check import Check, NoAnswerError, attempt, fail, in_words, not_needed, within
from megatron_kd.doctor.disk import check_locks, check_space, check_speed
from megatron_kd.doctor.gpus import check_gpus
from megatron_kd.doctor.inputs import samples_of
from megatron_kd.doctor.limits import check_limits, read_limits
from megatron_kd.doctor.space import cache_bytes, checkpoint_bytes, nearest_folder
from megatron_kd.doctor.target import Target
from megatron_kd.doctor.versions import check_versions, installed
from megatron_kd.errors import KDError

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
    try:
        plans = within(LOCAL_S, lambda: planned_writes(recipe))
    except (NoAnswerError, OSError, KDError) as error:
        return [*checks, fail("disk-space", in_words(error), "check run_dir and teacher.cache")]
    for folder, (what, needed) in plans.items():
        todo = f"check {folder} and its permissions, or choose another run_dir or teacher.cache"
        checks += attempt("disk-space", todo, LOCAL_S, partial(check_space, folder, needed, what))
        checks += attempt("file-locks", todo, LOCAL_S, partial(check_locks, folder))
        if not quick:
            checks += attempt("disk-speed", todo, LOCAL_S, partial(check_speed, folder))
    return checks


def planned_writes(recipe: Recipe) -> dict[Path, tuple[str, int]]:
    """For each folder that a recipe writes to, or the nearest one that exists: what, and how many bytes at most.

    Two folders of one file system share its room: each has the bytes of both.
    """
    planned = [(nearest_folder(recipe.run_dir), "checkpoints", checkpoint_bytes(recipe))]
    location = recipe.teacher.cache
    if location is not None and not is_url(location) and recipe.teacher.mode == "offline":
        # Of a cache that is there nobody knows how much is still to come.
        needed = 0 if cache_exists(location) else cache_bytes(recipe, samples_of(recipe))
        planned.append((nearest_folder(location), "the cache", needed))
    writes = {}
    for folder in dict.fromkeys(folder for folder, _, _ in planned):
        device = os.stat(folder).st_dev
        sharing = [(what, size) for other, what, size in planned if size and os.stat(other).st_dev == device]
        writes[folder] = " and ".join(what for what, _ in sharing), sum(size for _, size in sharing)
    return writes
