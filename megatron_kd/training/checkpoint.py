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

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer

from megatron_kd.config import ModelConfig
from megatron_kd.device import any_rank, fail_together, get_random_state, set_random_state
from megatron_kd.errors import CheckpointError, DamagedCheckpointError
from megatron_kd.files import write_json
from megatron_kd.models.checkpoint import (
    check_same_architecture,
    make_partial_directory,
    publish_directory,
    read_note,
    read_sharded,
    sharded_weights,
    write_note,
)
from megatron_kd.models.checkpoint_files import describe_files
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.sharded_write import ShardedWrite
from megatron_kd.training.guard import Guard
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


def _layout(groups: ParallelGroups) -> dict[str, int]:
    """All sizes that say which rank has which part of the model and of the batch."""
    return {
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "context_parallel_size": groups.cp_size,
        "expert_model_parallel_size": groups.ep_size,
        "expert_tensor_parallel_size": groups.etp_size,
        "data_parallel_size": groups.dp_size,
    }


def _random_state() -> ShardedObject:
    """The states of this rank's generators, one entry a rank: in the same layout each gets its own back."""
    return ShardedObject("rng_state", get_random_state(), (dist.get_world_size(),), (dist.get_rank(),))


def _sharded_state(student: Student, *, is_loading: bool, same_layout: bool) -> dict[str, Any]:
    weights = sharded_weights(student.bare)
    state: dict[str, Any] = {
        "model": weights,
        "optimizer": student.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_SHARDING),
        "scheduler": student.scheduler.state_dict(),
    }
    if same_layout:
        state["rng_state"] = _random_state()
    return state


class BegunCheckpoint:
    """A checkpoint whose content is fixed: ``write`` on every rank, in any thread, then ``publish`` on all together.

    Attributes:
        path: the name it will have.
        iteration: which it is of.
    """

    def __init__(
        self, student: Student, model: ModelConfig, groups: ParallelGroups, run_dir: Path, *, detached: bool = False
    ) -> None:
        """Collective.

        Args:
            detached: the student may be trained on before ``write`` has ended.

        Raises:
            CheckpointError, OSError, RemoteRankError: on every rank.
        """
        self._model, self._run_dir = model, run_dir
        self.iteration = student.iteration
        self.path = checkpoint_path(run_dir, student.iteration)
        self._progress = {
            "iteration": student.iteration,
            "consumed_samples": student.consumed_samples,
            "tokens": student.tokens,
            **student.guard.state(),
            **_layout(groups),
        }
        self._partial = make_partial_directory(self.path)
        state = _sharded_state(student, is_loading=False, same_layout=True)
        self._shards = ShardedWrite(state, self._partial, self.path, dict(_SHARDING), detached=detached)

    def write(self) -> None:
        """This rank's part of the files. Raises nothing and holds no collective."""
        self._shards.write()

    def publish(self, keep: int, best: Path | None = None) -> list[Path]:
        """Gives it its name, and takes all but the newest ``keep`` and ``best`` out of sight. Collective.

        Args:
            best: as the first rank sees it.

        Returns:
            On the first rank the folders that ``remove`` should now remove: of a large model that takes a while.

        Raises:
            CheckpointError, OSError, RemoteRankError: on every rank, when one could not write; the checkpoints before
                stay.
        """
        try:
            files = self._shards.finish()
        except CheckpointError:
            if dist.get_rank() == 0:
                remove([self._partial])  # a full disk has room again for what the run has yet to say
            raise
        with fail_together(f"saving {self.path}"):
            if dist.get_rank() == 0:
                write_json(self._partial / PROGRESS_NOTE, self._progress)
                write_note(self._partial, self._model, files | describe_files(self._partial, [PROGRESS_NOTE]), {})
        publish_directory(self._partial, self.path)
        with fail_together(f"removing old checkpoints of {self._run_dir}"):
            return _left_over(self._run_dir, keep, best) if dist.get_rank() == 0 else []


def is_saved(run_dir: Path, iteration: int) -> bool:
    """Whether the checkpoint of an iteration is there already. Collective. Raises as ``BegunCheckpoint``."""
    path = checkpoint_path(run_dir, iteration)
    with fail_together(f"saving {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    return any_rank(path.exists())


def save_checkpoint(student: Student, model: ModelConfig, groups: ParallelGroups, run_dir: Path, keep: int) -> Path:
    """Saves, publishes, and removes all but the newest ``keep``. Collective; one iteration is saved once.

    Raises:
        CheckpointError, OSError, RemoteRankError: as ``BegunCheckpoint``.
    """
    if not is_saved(run_dir, student.iteration):
        begun = BegunCheckpoint(student, model, groups, run_dir)
        begun.write()
        remove(begun.publish(keep))
    return checkpoint_path(run_dir, student.iteration)


def _left_over(run_dir: Path, keep: int, best: Path | None) -> list[Path]:
    """All but the newest ``keep`` checkpoints and ``best``, out of sight, and what killed saves and removals left."""
    for _, old in list_checkpoints(run_dir)[:-keep]:
        if old == best:
            continue
        # A removal that is interrupted must not leave a checkpoint that looks whole.
        old.rename(old.with_name(f".{old.name}{_REMOVED}"))
    return [
        left
        for left in (run_dir / "checkpoints").iterdir()
        if left.name.startswith(".iter_") and left.name.endswith((PARTIAL, _REMOVED))
    ]


def remove(folders: list[Path]) -> None:
    """Removes what it can; the next save finds the rest."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(student: Student, model: ModelConfig, groups: ParallelGroups, path: Path) -> None:
    """Restores model, optimizer, schedule, position in the data and, in the same layout, random states. Collective.

    The state of the optimizer is restored (moments, steps done), its settings are the recipe's: a run that goes on with
    another learning rate, or for longer, does as its recipe now says.

    Raises:
        DamagedCheckpointError: a part is missing or damaged; RemoteRankError on ranks that did not see it.
        CheckpointError: it is of another model.
    """
    with fail_together(f"reading {path}"):
        check_same_architecture(path, read_note(path), model)
        progress = read_progress(path)
    same_layout = all(progress.get(key) == size for key, size in _layout(groups).items())
    state = read_sharded(_sharded_state(student, is_loading=True, same_layout=same_layout), path)
    student.bare.load_state_dict(state["model"], strict=False)
    _load_optimizer(student.optimizer, state["optimizer"])
    student.scheduler.load_state_dict(state["scheduler"])
    if same_layout:
        set_random_state(state["rng_state"])
    student.iteration = progress["iteration"]
    student.consumed_samples = progress["consumed_samples"]
    student.tokens = progress["tokens"]
    student.guard = Guard.of(progress)


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Loads the moments and the steps done, and keeps the settings of the recipe.

    Megatron-Core finds the saved group of a parameter group by its rates among others, so these are set before.
    """
    settings = [{key: group[key] for key in _SETTINGS if key in group} for group in optimizer.param_groups]
    rates = {key: settings[0][key] for key in ("max_lr", "min_lr") if key in settings[0]}
    # A model with experts has two optimizers, one of them for its experts, and their states under 0 and 1.
    for part in [state] if "optimizer" in state else state.values():
        for saved in part["optimizer"]["param_groups"]:
            saved.update(rates)  # one pair for the whole model
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def read_progress(path: Path) -> dict[str, Any]:
    """Iteration, consumed samples, tokens, layout and guard of a checkpoint. Raises DamagedCheckpointError."""
    what = f"{path} has no readable {PROGRESS_NOTE}: not a checkpoint of a training run"
    try:
        progress: dict[str, Any] = json.loads((path / PROGRESS_NOTE).read_text())
    except (FileNotFoundError, ValueError) as error:
        raise DamagedCheckpointError(what) from error
    if not isinstance(progress, dict) or not {"iteration", "consumed_samples", "tokens"} <= progress.keys():
        raise DamagedCheckpointError(what)
    return progress
