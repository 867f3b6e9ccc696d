"""How much a run will write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_kd.config import Recipe
from megatron_kd.data.samples import SampleSet
from megatron_kd.planning.parameters import whole_model

_ADAM_BYTES = {"fp32": 16, "bf16": 14}
"""A parameter in a training checkpoint: the weight, the float32 master and the two moments of Adam."""
_VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_ID_BYTES = 2
"""An id as stored takes up to so many bytes in a vocabulary of 2^17 once compressed (docs/cache.md)."""
_TOKEN_BYTES = 16


def checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of the checkpoints that a run has on disk at most: those it keeps, and the one being written."""
    saves = 1
    if recipe.checkpoint.save_interval is not None:
        saves = -(-recipe.training.train_iters // recipe.checkpoint.save_interval)
    kept = min(recipe.checkpoint.keep + 1, saves)
    return kept * whole_model(recipe.student.model) * _ADAM_BYTES[recipe.training.precision]


def cache_bytes(recipe: Recipe, samples: SampleSet | None) -> int:
    """Bytes of the whole cache at most; 0 where nobody says yet how many tokens there are."""
    if samples is not None:
        tokens = len(samples) * samples.seq_length
    else:
        tokens = (recipe.data.train_tokens or 0) + (recipe.data.heldout_tokens or 0)
    teacher = recipe.teacher
    extra = 8 * (len(teacher.temperatures) - 1)
    slot = _VALUE_BYTES[teacher.capture.value_dtype] + _ID_BYTES
    return tokens * (teacher.top_k * slot + _TOKEN_BYTES + extra)


def nearest_folder(path: str | Path) -> Path:
    """The path itself, or the deepest folder above it that exists.

    Raises:
        NotADirectoryError: a file lies there, or on the way.
    """
    place = Path(path).absolute()
    while not place.is_dir():
        if os.path.lexists(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        place = place.parent
    return place
