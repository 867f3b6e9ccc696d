"""Named tensors that are in memory, or mapped into it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_kd.errors import CheckpointError


class TensorsInMemory:
    """A state dictionary, read by name."""

    def __init__(self, path: Path, state: dict[str, Tensor]) -> None:
        """``path``: where they came from, for messages."""
        self.path = path
        self._state = state

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._state)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there."""
        return self._state[name].dtype

    def read(self, name: str, index: int | None = None) -> Tensor:
        """One tensor, or one index of its first dimension. Raises CheckpointError if there is none of that name."""
        if name not in self._state:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; its architecture is not the recipe's")
        return self._state[name] if index is None else self._state[name][index]
