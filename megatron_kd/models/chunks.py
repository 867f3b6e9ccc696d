"""What one rank holds of a model: one module, or several chunks where the pipeline's stages are interleaved.

With v chunks on each of p stages, chunk c of stage r has part c·p + r of p·v equal parts of the layers: every micro
batch goes round the stages v times, and the pipeline fills and drains in a v-th of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module, ModuleList


class Chunks(ModuleList):
    """The chunks of one rank, in the order in which micro batches pass through them."""


def chunks_of(model: Module) -> list[Any]:
    """The chunks of a model on this rank, or of what wraps them; where stages are not interleaved the model alone."""
    return list(model) if isinstance(model, Chunks) else [model]


def as_model(chunks: Sequence[Module]) -> Any:
    """What ``chunks_of`` takes apart."""
    return chunks[0] if len(chunks) == 1 else Chunks(chunks)
