"""The size of a cache, from the bytes measured on real targets (docs/measurements.md, "The cache alone")."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import Recipe

ID_BYTES = 1.59
"""An id as its rank in a table of frequencies, compressed; the same for vocabularies of 49,152 and 201,088."""
VALUE_BYTES = {"float16": 0.70, "bfloat16": 0.37, "float32": 2.5}
"""Differences of the bit patterns, compressed; float32 by its 14 bits more of noise."""
ROW_BYTES = 5.0
"""Tail mass and token."""
TEMPERATURE_BYTES = 7.0
"""Normaliser and tail mass of each further temperature: float32 each, hardly compressible."""


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache.

    Attributes:
        tokens: positions it holds: those of data.train_tokens and heldout_tokens, else of all steps of the run.
    """

    tokens: int
    bytes_per_token: float

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.tokens * self.bytes_per_token


def plan_cache(recipe: Recipe) -> CacheSize:
    """The cache of a recipe, online ones too: what offline would take."""
    teacher, data = recipe.teacher, recipe.data
    per_token = teacher.top_k * (ID_BYTES + VALUE_BYTES[teacher.capture.value_dtype]) + ROW_BYTES
    per_token += TEMPERATURE_BYTES * (len(teacher.temperatures) - 1)
    steps = recipe.training.train_iters * recipe.training.global_batch_size * data.seq_length
    tokens = data.train_tokens or steps
    return CacheSize(tokens + (data.heldout_tokens or 0), per_token)
