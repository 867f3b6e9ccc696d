"""Megatron tensors, wherever they come from, seen as Hugging Face weights through their family's table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.hf_config import hf_config
from megatron_kd.models.parameters import Place, places


class TableWeights(ABC):
    """An ``HFWeights`` over whole Megatron tensors; nothing is read before it is asked for.

    Attributes:
        path: where they lie, for messages.
        model: the architecture that they are of.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self.path = path
        self.model = model
        # For each name the places that it is made of (several where it holds all experts), and which of their tensors.
        self._sources: dict[str, list[tuple[Place, int]]] = {}
        for place in places(model):
            for part, name in enumerate(place.hf_names):
                self._sources.setdefault(name, []).append((place, part))
        self._last: tuple[Place, list[Tensor]] | None = None

    @abstractmethod
    def megatron(self, place: Place) -> Tensor:
        """The whole Megatron tensor of a place, in its own shape but for padding of the vocabulary.

        Raises CheckpointError where it is missing or damaged.
        """

    def names(self) -> list[str]:
        """All Hugging Face names, sorted."""
        return sorted(self._sources)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """One tensor, or one index of its first dimension alone: of experts, only that one is read.

        Raises:
            CheckpointError: there is none of that name, or it does not fit the architecture.
            IndexError: it has no such index.
        """
        if name not in self._sources:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; its architecture is not the recipe's")
        sources = self._sources[name]
        if not sources[0][0].entry.stacked:
            tensor = self._part(*sources[0])
            return tensor if index is None else tensor[index]
        if index is not None:
            return self._part(*sources[index])
        return torch.stack([self._part(*source) for source in sources])

    def config(self) -> dict[str, Any]:
        """The Hugging Face configuration of the architecture."""
        return hf_config(self.model)

    def _part(self, place: Place, part: int) -> Tensor:
        # Queries, keys and values come from one tensor and are asked for one after the other.
        if self._last is None or self._last[0] != place:
            tensor = self.megatron(place)
            try:
                self._last = place, place.entry.layout.to_hf(tensor, self.model)
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{self.path}: {place.megatron_name} of shape {tuple(tensor.shape)} does not fit the model "
                    f"{self.model.name!r}: {error}"
                ) from error
        return self._last[1][part]
