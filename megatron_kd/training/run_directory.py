"""The run directory: what was run, where, and what came of it.

recipe.yaml (resolved), environment.json, status.json, metrics.jsonl, evaluations/, checkpoints/, logs/, wandb/; and
router_mass.json where the student's experts were chosen by it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_kd import __version__
from megatron_kd.config import Recipe, dump_recipe, recipe_differences
from megatron_kd.config.yaml_text import parse_yaml, read_mapping
from megatron_kd.device import describe_hardware
from megatron_kd.errors import ConfigError
from megatron_kd.files import write_atomic, write_json
from megatron_kd.status import has_begun
from megatron_kd.versions import installed_versions

# A resumed run must not differ in these: the weights would not fit, the data position would mean other rows, or one
# curve would be drawn from two methods. What may change midway (length, rates, intervals, layout, paths) is left out.
_FIXED = (
    "name",
    "seed",
    "data.samples",
    "data.seq_length",
    "data.shuffle",
    "data.train_tokens",
    "loss.beta",
    "loss.ce_weight",
    "loss.divergence",
    "loss.implementation",
    "loss.scale_by_t2",
    "loss.tail",
    "loss.temperature",
    "student.checkpoint",
    "student.from_teacher",
    "student.model",
    "teacher.mode",
    "teacher.model",
    "teacher.targets",
    "teacher.top_k",
    "training.global_batch_size",
    "training.precision",
)
_FREE = ("teacher.model.hf", "student.model.hf")
logger = logging.getLogger(__name__)

STATUS_FILE = "status.json"
"""state, iteration of the newest checkpoint, train_iters; see ``megatron_kd.status``."""
_LIBRARIES = ("torch", "megatron-core", "transformers", "numpy", "numcodecs", "pydantic", "wandb")


def open_run_directory(recipe: Recipe, *, record: bool = True) -> Path:
    """Creates the directory, or takes up an existing run of the same recipe. One rank calls this.

    Args:
        record: write recipe.yaml and environment.json.

    Raises:
        ConfigError: the directory holds a run that this recipe does not continue; names the key and both values.
    """
    path = Path(recipe.run_dir)
    for name in ("evaluations", "checkpoints", "logs"):
        (path / name).mkdir(parents=True, exist_ok=True)
    resolved = dump_recipe(recipe)
    stored = path / "recipe.yaml"
    # A first attempt that ended before its first step binds nobody: its recipe may have been the mistake.
    if stored.exists() and has_begun(path):
        for key, before, now in recipe_differences(read_mapping(stored), parse_yaml(resolved, "the recipe")):
            if key.startswith(_FIXED) and not key.startswith(_FREE):
                raise ConfigError(
                    f"{path} holds a run with {key} {before!r}, the recipe now says {now!r}: "
                    f"choose another run_dir (run_dir={path}_2), or remove the old run"
                )
    if record:
        write_atomic(stored, resolved)
        write_json(path / "environment.json", describe_environment())
    return path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keeps other trainings out of a run directory while entered; a killed process lets go of it by dying.

    Raises:
        ConfigError: another training holds it.
    """
    path.mkdir(parents=True, exist_ok=True)
    with open(path / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is in use by another training: wait for it, stop it, or choose another run_dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning("%s lies on a file system without locks: see to it that one training uses it", path)
        yield


def describe_environment() -> dict[str, Any]:
    """Versions, git revision and hardware."""
    return {
        "megatron_kd": __version__,
        "python": platform.python_version(),
        "libraries": installed_versions(*_LIBRARIES),
        "git_revision": git_revision(),
        "hardware": describe_hardware(),
    }


def git_revision() -> str | None:
    """The revision of the source tree, with ``+changes`` if it was changed; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drops what was measured behind the iteration a run resumes from, so that every iteration stands there once."""
    for evaluation in (path / "evaluations").glob("*iter_*.json"):
        number = evaluation.stem.rpartition("iter_")[2]
        if number.isdigit() and int(number) > iteration:
            evaluation.unlink()
    file = path / "metrics.jsonl"
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the run was killed while it wrote its last line
            break
        if isinstance(record, dict) and record.get("iteration", math.inf) <= iteration:
            kept.append(line)
    write_atomic(file, "".join(line + "\n" for line in kept))
