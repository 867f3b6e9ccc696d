"""A student's weights as a view over its teacher's: kept layers, experts, FFN rows and query groups.

Nothing is copied before it is read, and of the teacher only what the reader's part of the student is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.cut_scores import ffn_row_scores, largest, query_group_scores
from megatron_kd.models.families import Entry, family_of
from megatron_kd.models.hf_source import HFWeights
from megatron_kd.models.parameters import Place
from megatron_kd.models.table_weights import TableWeights

ROUTER, FFN, ATTENTION = ".mlp.router.", ".mlp.", ".self_attention."


class CutWeights(TableWeights):
    """``HFWeights`` of a student, made of its teacher's.

    FFN rows and query groups are chosen layer by layer, expert by expert (``cut_scores``), on the whole matrices, so
    that every rank chooses the same.
    """

    def __init__(
        self,
        weights: HFWeights,
        teacher: ModelConfig,
        student: ModelConfig,
        layers: Sequence[int],
        experts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            weights: the teacher's.
            student: ``teacher.cut(layers, …)``.
            layers: student layer i is the teacher's layer layers[i].
            experts: the experts of that layer which are left, rising; None: all.
        """
        super().__init__(weights.path, student)
        self._weights = weights
        self._teacher = teacher
        self._layers = layers
        self._experts = experts
        self._entries = {entry.megatron: entry for entry in family_of(teacher).layer}
        self._offset = float(family_of(teacher).transformer(teacher).get("glu_linear_offset", 0.0))
        self._chosen: dict[tuple[str, int, int | None], Tensor] = {}

    def megatron(self, place: Place) -> Tensor:
        """A tensor of the student, cut out of the teacher's."""
        theirs = self._teachers(place)
        tensor = self._whole(theirs)
        entry = place.entry
        if entry.is_of_layer:
            assert theirs.layer is not None and place.layer is not None
            if ROUTER in entry.megatron and self._experts is not None:
                tensor = tensor[list(self._experts[place.layer])]
            # Tensor parallelism splits a layer's tensors along the very width that a cut picks from.
            elif entry.tp_dim is not None and FFN in entry.megatron:
                tensor = self._pick_rows(tensor, entry.tp_dim, theirs.layer, theirs.expert)
            elif entry.tp_dim is not None and ATTENTION in entry.megatron:
                tensor = self._pick_groups(tensor, entry.tp_dim, theirs.layer)
        return tensor.flatten(0, 1) if entry.layout.paired else tensor

    def _teachers(self, place: Place) -> Place:
        layer, expert = place.layer, place.expert
        if layer is None:
            return place
        if expert is not None and self._experts is not None:
            expert = self._experts[layer][expert]
        return Place(place.entry, self._layers[layer], expert)

    def _whole(self, theirs: Place) -> Tensor:
        try:
            return theirs.whole(self._weights.read, self._teacher)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.path}: {', '.join(theirs.hf_names)} do not fit the teacher {self._teacher.name!r}: {error}"
            ) from error

    def _pick_rows(self, tensor: Tensor, dim: int, layer: int, expert: int | None) -> Tensor:
        if self.model.ffn_hidden_size == self._teacher.ffn_hidden_size:
            return tensor
        key = FFN, layer, expert
        if key not in self._chosen:
            fc1, fc2 = (self._whole(Place(self._matrix(FFN, f"linear_fc{i}"), layer, expert)) for i in (1, 2))
            scores = ffn_row_scores(fc1, fc2, self._offset)
            self._chosen[key] = torch.tensor(largest(scores, self.model.ffn_hidden_size))
        return tensor.index_select(dim, self._chosen[key])

    def _pick_groups(self, tensor: Tensor, dim: int, layer: int) -> Tensor:
        groups = self._teacher.num_query_groups
        if self.model.num_query_groups == groups:
            return tensor
        key = ATTENTION, layer, None
        if key not in self._chosen:
            qkv, projection = (
                self._whole(Place(self._matrix(ATTENTION, name), layer)) for name in ("linear_qkv", "linear_proj")
            )
            scores = query_group_scores(qkv, projection, groups, self._teacher.kv_channels)
            self._chosen[key] = torch.tensor(largest(scores, self.model.num_query_groups))
        # All rows or columns of a group lie together: its queries, key and value, its heads, its sinks.
        grouped = tensor.unflatten(dim, (groups, -1)).index_select(dim, self._chosen[key])
        return grouped.flatten(dim, dim + 1)

    def _matrix(self, part: str, linear: str) -> Entry:
        return next(
            entry for name, entry in self._entries.items() if part in name and name.endswith(f"{linear}.weight")
        )
