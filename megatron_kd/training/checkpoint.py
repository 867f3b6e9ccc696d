"""Training checkpoints: everything that a run needs to go on as if it had never stopped.

``<run_dir>/checkpoints/iter_0000200/`` holds a ``torch_dist`` checkpoint (model, optimizer, schedule, random states)
that loads in any layout, ``model.json`` as every checkpoint of weights has, and ``progress.json``. It appears under
that name only when all ranks have written their parts.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer

from megatron_kd.config import ModelConfig
from megatron_kd.device import any_rank, current_device, fail_together, get_random_state, set_random_state
from megatron_kd.errors import CheckpointError
from megatron_kd.files import write_json
from megatron_kd.models.checkpoint import (
    MODEL_NOTE,
    check_same_architecture,
    make_partial_directory,
    publish_directory,
    read_note,
    read_sharded,
    sharded_weights,
    write_sharded,
)
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.training.setup import Student

PROGRESS_NOTE = "progress.json"
PARTIAL = ".partial"
_REMOVED = ".removed"
_SETTINGS = ("betas", "eps", "max_lr", "min_lr")  # of an optimizer's parameter group; the schedule sets lr and decay
_NAME = re.compile(r"^iter_(\d{7,})$")
# The form of the optimizer state that loads in any layout; the default one of Megatron-Core no longer loads at all.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return run_dir / "checkpoints" / f"iter_{iteration:07d}"


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """All complete checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return sorted(found)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint a run goes on from, as the first rank sees it, or None. Collective over all ranks.

    Each rank asking the file system for itself could get another answer where directories are cached (NFS does), and
    ranks that load different checkpoints wait for each other for ever.
    """
    with fail_together(f"looking into {run_dir}"):
        saved = list_checkpoints(run_dir) if dist.get_rank() == 0 else []
    iteration = torch.tensor([saved[-1][0] if saved else -1], dtype=torch.int64, device=current_device())
    dist.broadcast(iteration, src=0)
    return checkpoint_path(run_dir, int(iteration.item())) if iteration.item() >= 0 else None


def _random_state(groups: ParallelGroups) -> ShardedObject:
    """The states of this rank's generators, one entry per tensor-parallel rank; data-parallel peers share it."""
    return ShardedObject(
        "rng_state", get_random_state(), (groups.tp_size,), (groups.tp_rank,), replica_id=groups.dp_rank
    )


def _sharded_state(student: Student, groups: ParallelGroups, *, is_loading: bool, same_layout: bool) -> dict[str, Any]:
    weights = sharded_weights(student.model.module)
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": student.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_SHARDING),
        "scheduler": student.scheduler.state_dict(),
    }
    if same_layout:
        state["rng_state"] = _random_state(groups)
    return state


def save_checkpoint(student: Student, model: ModelConfig, groups: ParallelGroups, run_dir: Path, keep: int) -> Path:
    """Saves and publishes, then removes all but the newest ``keep``. Collective; one iteration is saved once.

    Raises:
        CheckpointError, OSError, RemoteRankError: on every rank, when one could not write; the checkpoints before
            stay.
    """
    path = checkpoint_path(run_dir, student.iteration)
    with fail_together(f"saving {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if any_rank(path.exists()):
        return path
    partial = make_partial_directory(path)
    state = _sharded_state(student, groups, is_loading=False, same_layout=True)
    write_sharded(state, partial, path, dict(_SHARDING))
    with fail_together(f"saving {path}"):
        if dist.get_rank() == 0:
            write_json(partial / MODEL_NOTE, {"architecture": model.model_dump(mode="json")})
            write_json(
                partial / PROGRESS_NOTE,
                {
                    "iteration": student.iteration,
                    "consumed_samples": student.consumed_samples,
                    "tokens": student.tokens,
                    "tensor_model_parallel_size": groups.tp_size,
                    "data_parallel_size": groups.dp_size,
                },
            )
    publish_directory(partial, path)
    with fail_together(f"removing old checkpoints of {run_dir}"):
        if dist.get_rank() == 0:
            _prune(run_dir, keep)
    return path


def _prune(run_dir: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints, and what killed processes left of saves and removals."""
    for _, old in list_checkpoints(run_dir)[:-keep]:
        # Out of sight first: a removal that is interrupted must not leave a checkpoint that looks whole.
        old.rename(old.with_name(f".{old.name}{_REMOVED}"))
    for left in (run_dir / "checkpoints").iterdir():
        if left.name.startswith(".iter_") and left.name.endswith((PARTIAL, _REMOVED)):
            shutil.rmtree(left, ignore_errors=True)


def load_checkpoint(student: Student, model: ModelConfig, groups: ParallelGroups, path: Path) -> None:
    """Restores model, optimizer, schedule, position in the data and, in the same layout, random states. Collective.

    The state of the optimizer is restored (moments, steps done), its settings are the recipe's: a run that goes on with
    another learning rate, or for longer, does as its recipe now says.

    Raises:
        CheckpointError: a part is missing or damaged, or it is of another model; on every rank.
    """
    with fail_together(f"reading {path}"):
        check_same_architecture(path, read_note(path), model)
        progress = read_progress(path)
    same_layout = progress["tensor_model_parallel_size"] == groups.tp_size
    try:
        state = read_sharded(_sharded_state(student, groups, is_loading=True, same_layout=same_layout), path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove it, and the run goes on from the checkpoint before it") from error
    student.model.module.load_state_dict(state["model"], strict=False)
    _load_optimizer(student.optimizer, state["optimizer"])
    student.scheduler.load_state_dict(state["scheduler"])
    if same_layout:
        set_random_state(state["rng_state"])
    student.iteration = progress["iteration"]
    student.consumed_samples = progress["consumed_samples"]
    student.tokens = progress["tokens"]


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Loads the moments and the steps done, and keeps the settings of the recipe.

    Megatron-Core finds the saved group of a parameter group by its rates among others, so these are set before.
    """
    settings = [{key: group[key] for key in _SETTINGS if key in group} for group in optimizer.param_groups]
    rates = {key: settings[0][key] for key in ("max_lr", "min_lr") if key in settings[0]}
    for saved in state["optimizer"]["param_groups"]:
        saved.update(rates)  # one pair for the whole model
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def read_progress(path: Path) -> dict[str, int]:
    """Iteration, consumed samples, tokens and layout of a checkpoint. Raises CheckpointError if it is none."""
    try:
        progress: dict[str, int] = json.loads((path / PROGRESS_NOTE).read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} has no readable {PROGRESS_NOTE}: not a checkpoint of a training run") from error
    return progress
