"""The teacher as a Megatron-Core model.

b rows, s positions, N = s·b tokens sequence first, D hidden, Vl rows of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from megatron_kd.models.schedule import run_schedule
from megatron_kd.models.transformer_config import params_dtype
from megatron_kd.teacher.rows import joined, of_whole_rows, padded
from megatron_kd.teacher.topk import ExtractedTopK, extract_top_k

ENGINE = "megatron"


class MegatronTeacher:
    """A frozen model loaded from ``teacher.checkpoint``.

    Its methods are collective over all ranks of one copy of the model, and where experts are spread over ranks
    (``expert_model_parallel_size`` above 1) over all those: each then asks as often, for as many micro batches. With
    several pipeline stages the last one has the answers; on the others there are none.
    """

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
        self._micro_batch_size = recipe.teacher.capture.micro_batch_size
        chunk_mib = recipe.loss.chunk_mib
        self._chunk_bytes = None if chunk_mib is None else int(chunk_mib * 2**20)
        self.model = build_model(
            recipe.teacher.model, recipe.parallelism, groups, recipe.training.precision, trainable=False
        )
        path = Path(recipe.teacher.checkpoint)
        load_weights(self.model, recipe.teacher.model, path)
        self._note = read_note(path)

    @property
    def head(self) -> Tensor | None:
        """This rank's shard of the head, a parameter of the model; None on a stage before the last."""
        if not self._groups.is_last_stage:
            return None
        shared = self.model.share_embeddings_and_output_weights
        weight: Tensor = self.model.shared_embedding_or_output_weight() if shared else self.model.output_layer.weight
        return weight

    def drop_head(self) -> None:
        """Gives back the memory of a head that nobody will ask for: only hidden states are wanted. No collective.

        A head that is the embedding of this rank's own first stage stays.
        """
        tied = self.model.share_embeddings_and_output_weights and self._groups.is_first_stage
        if self.head is not None and not tied:
            self.head.untyped_storage().resize_(0)

    @property
    def hidden_size(self) -> int:
        """D."""
        return self._teacher.model.hidden_size

    @property
    def top_k_size(self) -> int:
        """K."""
        return self._teacher.top_k

    @property
    def dtype(self) -> torch.dtype:
        """That of hidden states."""
        return params_dtype(self._precision)

    def identity(self) -> dict[str, Any]:
        """What decides this teacher's answers; kept in every cache it writes. The layout is no part of it."""
        return teacher_identity(self._note, self._precision)

    def hidden_states(
        self, micro_batches: Sequence[Tensor], documents: Sequence[Tensor] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """The last hidden states of micro batches, and this rank's shard of the head.

        Args:
            micro_batches: at least one, of equal shape: int64 [b, s], the s positions that a context-parallel rank has.
            documents: of each the documents of its whole rows, see ``TeacherEngine.top_k``; None: none.

        Returns:
            For each hidden [s, b, D] (with sequence parallelism this rank's slice [s/tp, b, D]) and weight [Vl, D];
            nothing on a stage before the last.
        """
        return self._run(micro_batches, documents, lambda hidden, weight: (hidden, weight))

    def top_k_of(
        self, micro_batches: Sequence[Tensor], documents: Sequence[Tensor] | None = None
    ) -> list[ExtractedTopK]:
        """The top-K targets of micro batches, at the recipe's temperatures.

        Args:
            micro_batches: at least one, of equal shape: int64 [b, s], the s positions that a context-parallel rank has.
            documents: of each the documents of its whole rows, see ``TeacherEngine.top_k``; None: none.

        Returns:
            Of each the targets [N] = [s·b], sequence first; nothing on a stage before the last.
        """
        return self._run(micro_batches, documents, self._extract)

    def top_k(self, tokens: Tensor, documents: Tensor | None = None) -> ExtractedTopK | None:
        """The top-K targets of every position, [N] = [s·b] sequence first; None on a stage before the last.

        Context-parallel ranks bring and get whole rows.

        With several stages the rows go through them in micro batches of ``teacher.capture.micro_batch_size``, one
        behind the other.

        Args:
            tokens: int64 [b, s].
            documents: see ``TeacherEngine.top_k``.
        """
        rows, length = tokens.shape
        size = self._micro_batch_size if self._groups.pp_size > 1 else rows
        mine = tokens[:, self._groups.context.positions(length, tokens.device)] if self._groups.cp_size > 1 else tokens
        whole = None if documents is None else padded(documents, -rows % size + rows).split(size)
        parts = self.top_k_of(padded(mine, -rows % size + rows).split(size), whole)
        if not parts:
            return None
        return of_whole_rows(joined(parts, mine.shape[1], rows), mine.shape[1], self._groups.cp_group)

    @torch.no_grad()
    def _run[T](
        self,
        micro_batches: Sequence[Tensor],
        documents: Sequence[Tensor] | None,
        finish: Callable[[Tensor, Tensor], T],
    ) -> list[T]:
        """What ``finish`` makes of the hidden states and the head, for each micro batch on the last stage."""

        def forward(
            model: torch.nn.Module, batch: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            tokens, numbers = batch
            captured: dict[str, Tensor] = {}

            def keep(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
                captured["weight"] = head_of(output_layer, output_weight)
                return hidden_states

            def report(hidden: Tensor) -> tuple[Tensor, Tensor, T]:
                # The schedule asks for a loss and its tokens; of a frozen model nobody uses them.
                nothing = hidden.new_zeros(())
                return nothing, nothing.to(torch.int), finish(hidden, captured["weight"])

            positions = self._groups.context.places(tokens, numbers)
            return model(tokens, positions, numbers, output_processor=keep), report

        rows, length = micro_batches[0].shape
        within: Sequence[Tensor | None] = documents or [None] * len(micro_batches)
        return run_schedule(
            self.model,
            self._groups,
            list(zip(micro_batches, within, strict=True)),
            forward,
            number=len(micro_batches),
            seq_length=length * self._groups.cp_size,
            micro_batch_size=rows,
            forward_only=True,
        )

    def _extract(self, hidden: Tensor, weight: Tensor) -> ExtractedTopK:
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
