"""What a capture needs of a teacher, whatever runs it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.topk import ExtractedTopK


class TeacherEngine(Protocol):
    """A frozen teacher that answers for whole rows.

    A row is one sequence: positions 0 … s − 1, each seeing all before it, whatever documents the row is packed from.
    Where documents are given each of them is such a sequence instead, answered for as if it stood alone. Every engine
    answers this same question, so that their caches can be compared.
    """

    def identity(self) -> dict[str, Any]:
        """What decides this teacher's answers, as JSON values: name, weights, architecture, engine, dtype.

        It is part of the identity of every cache the engine writes; the parallel layout is not.
        """
        ...

    def top_k(self, tokens: Tensor, documents: Tensor | None = None) -> ExtractedTopK | None:
        """The top-K targets of every position at the recipe's temperatures.

        Collective over the ranks of one copy of the model (tensor-parallel ones, all stages of a pipeline), and where
        experts are spread over ranks over all data-parallel ranks, each of which then brings as many rows.

        Args:
            tokens: int64 [b, s] on the current device, the same on every rank of one copy.
            documents: integers [b, s] beside them, equal within a document and unlike in neighbouring ones.

        Returns:
            Targets [N] = [s·b], sequence first, the same on every rank of the last stage; None on stages before it.
        """
        ...


def open_teacher(recipe: Recipe, groups: ParallelGroups) -> TeacherEngine:
    """Loads the teacher with the engine that ``teacher.engine`` names. Collective over all ranks.

    Raises:
        ConfigError: the recipe names no weights, or the engine is not installed or cannot run in this layout.
        CheckpointError: the weights are missing, damaged or of another model.
    """
    if recipe.teacher.engine == "hf":
        from megatron_kd.teacher.hf_engine import HFTeacher  # transformers takes seconds to import

        return HFTeacher(recipe)
    if recipe.teacher.engine == "vllm":
        from megatron_kd.teacher.vllm_engine import VLLMTeacher

        return VLLMTeacher(recipe)
    from megatron_kd.teacher.megatron_engine import MegatronTeacher

    return MegatronTeacher(recipe, groups)
