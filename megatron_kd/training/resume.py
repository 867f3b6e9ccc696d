"""Which checkpoint a run goes on from: the newest, or the newest that is whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megatron_kd.config import ModelConfig
from megatron_kd.device import any_rank, fail_together, first_message, first_rank_tells
from megatron_kd.errors import CheckpointError, DamagedCheckpointError, KDError
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.training.checkpoint import list_checkpoints, load_checkpoint
from megatron_kd.training.setup import Student

DAMAGED = ".damaged"
logger = logging.getLogger(__name__)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run as the first rank sees it, or None. Collective over all ranks."""
    saved = _saved(run_dir)
    return saved[-1] if saved else None


def load_newest_checkpoint(
    student: Student,
    model: ModelConfig,
    groups: ParallelGroups,
    run_dir: Path,
    on_damage: Literal["refuse", "previous"] = "refuse",
) -> Path:
    """Restores the newest checkpoint or, where asked to, the newest that is whole. Collective; all take the same one.

    Those that are skipped get names that end in ``.damaged``, so that training can save there again.

    Args:
        on_damage: ``previous`` goes back to the checkpoint before a damaged one, and warns.

    Returns:
        What was loaded.

    Raises:
        CheckpointError: there is none, none that is whole, or it is of another model.
        RemoteRankError: that, on ranks that did not see it.
    """
    saved = _saved(run_dir)
    if not saved:
        raise CheckpointError(f"{run_dir} has no checkpoint")
    for skipped, path in enumerate(reversed(saved)):
        try:
            load_checkpoint(student, model, groups, path)
        except KDError as error:
            # Damage may show on one rank alone, and a rank may have died: now all do the same, or all end.
            if not any_rank(isinstance(error, DamagedCheckpointError)):
                raise
            if on_damage == "refuse":
                raise _with_advice(error) from error
            said = _said_by_any_rank(error)
            if path == saved[0]:
                raise CheckpointError(
                    f"{said}; of the {len(saved)} checkpoints in {path.parent} none is whole: remove them, and the run "
                    "begins anew"
                ) from error
            logger.warning("%s; the run goes back to the checkpoint before it", said)
        else:
            _put_aside(saved[len(saved) - skipped :])
            return path
    raise AssertionError("the oldest checkpoint was loaded or refused")


def _saved(run_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first, as the first rank sees them. Collective over all ranks.

    Each rank asking the file system for itself could get another answer where directories are cached (NFS does), and
    ranks that load different checkpoints wait for each other for ever.
    """
    return first_rank_tells(f"looking into {run_dir}", lambda: [path for _, path in list_checkpoints(run_dir)])


def _with_advice(error: KDError) -> KDError:
    if not isinstance(error, DamagedCheckpointError):
        return error  # this rank saw nothing itself
    return DamagedCheckpointError(
        f"{error}; set checkpoint.on_damage to previous, or remove it: the run goes on from the one before it"
    )


def _said_by_any_rank(error: KDError) -> str:
    """What the first rank that found damage says of it, on all ranks. Collective."""
    said = first_message(str(error) if isinstance(error, DamagedCheckpointError) else None)
    assert said is not None
    return said


def _put_aside(damaged: list[Path]) -> None:
    """Takes damaged checkpoints out of the run's own, on the first rank. Collective."""
    with fail_together("putting damaged checkpoints aside"):
        if dist.get_rank() == 0:
            for path in damaged:
                name, count = f"{path.name}{DAMAGED}", 1
                while path.with_name(name).exists():
                    count += 1
                    name = f"{path.name}{DAMAGED}{count}"
                path.rename(path.with_name(name))
                logger.warning("%s is kept as %s", path, name)
