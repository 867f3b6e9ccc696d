"""The teacher as a Megatron-Core model, in the same parallel layout as the student.

b rows, s positions, N = s·b tokens sequence first, D hidden, Vl rows of the head on this rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.errors import ConfigError
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import load_weights, read_note
from megatron_kd.models.head import head_of, vocab_start
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.topk import ExtractedTopK, extract_top_k

ENGINE = "megatron"


class MegatronTeacher:
    """A frozen model loaded from ``teacher.checkpoint``; its methods are collective over the tensor-parallel group."""

    def __init__(self, recipe: Recipe, groups: ParallelGroups) -> None:
        """Builds and loads the model.

        Raises:
            ConfigError: the recipe names no checkpoint.
            CheckpointError: it is missing or of another model.
        """
        if recipe.teacher.checkpoint is None:
            raise ConfigError("teacher.checkpoint is not set: name the folder that megatron-kd convert import wrote")
        self._teacher = recipe.teacher
        self._groups = groups
        self._vocab_size = recipe.teacher.model.vocab_size
        self._precision = recipe.training.precision
        chunk_mib = recipe.loss.chunk_mib
        self._chunk_bytes = None if chunk_mib is None else int(chunk_mib * 2**20)
        self.model = build_model(
            recipe.teacher.model, recipe.parallelism, groups, recipe.training.precision, trainable=False
        )
        path = Path(recipe.teacher.checkpoint)
        load_weights(self.model, recipe.teacher.model, path)
        self._note = read_note(path)

    def identity(self) -> dict[str, Any]:
        """What decides this teacher's answers; kept in every cache it writes. The layout is no part of it."""
        return teacher_identity(self._note, self._precision)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states and this rank's shard of the head.

        Args:
            tokens: int64 [b, s].

        Returns:
            hidden [s, b, D] (with sequence parallelism this rank's slice [s/tp, b, D]) and weight [Vl, D].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        captured: dict[str, Tensor] = {}

        def keep(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            captured["weight"] = head_of(output_layer, output_weight)
            return hidden_states

        hidden: Tensor = self.model(tokens, positions, None, output_processor=keep)
        return hidden, captured["weight"]

    @torch.no_grad()
    def top_k(self, tokens: Tensor) -> ExtractedTopK:
        """The top-K targets of every position, [N] = [s·b] sequence first, at the recipe's temperatures.

        Args:
            tokens: int64 [b, s].
        """
        hidden, weight = self.hidden_states(tokens)
        if self._groups.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._groups.tp_group)
        first, *others = self._teacher.temperatures
        return extract_top_k(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            self._teacher.top_k,
            vocab_size=self._vocab_size,
            vocab_start=vocab_start(weight, self._groups),
            temperature=first,
            extra_temperatures=tuple(others),
            group=self._groups.tp_group,
            chunk_bytes=self._chunk_bytes,
        )


def teacher_identity(note: dict[str, Any], precision: str) -> dict[str, Any]:
    """A teacher's identity from the note of its checkpoint (``model.json``) and the precision it runs in."""
    architecture = {key: value for key, value in note["architecture"].items() if key != "hf"}
    return {
        "name": architecture["name"],
        "weights_sha256": note.get("weights_sha256"),
        "architecture": architecture,
        "engine": ENGINE,
        "dtype": precision,
    }
