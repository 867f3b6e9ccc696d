"""What an online teacher takes in its own layout, with its weights on the device or in the host's memory.

R rows of a step; where the teacher is asked at once (``OnlineTeacher.at_once``) the loss has the answers for all of its
rank's micro batches waiting: D numbers for each position of its slice with whole distributions, 8·K + 4 bytes for each
position with top-K targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_kd.config import Recipe
from megatron_kd.config.gpus import GPU
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.planning.activations import stage_activations
from megatron_kd.planning.communication import answer_exchange
from megatron_kd.planning.efficiency import HOST_LINK
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.loss_workspace import LossShape, default_budget
from megatron_kd.planning.parameters import rank_parameters
from megatron_kd.planning.recomputation import Recomputation


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes on the fullest rank of one of the student's stages.

    Attributes:
        kept: weights, in every moment.
        held: answers that wait for the loss.
        passing: beside those while the teacher runs.
        host: weights, in the memory of each rank's host.
    """

    kept: float = 0.0
    held: float = 0.0
    passing: float = 0.0
    host: float = 0.0


def has_own_layout(recipe: Recipe) -> bool:
    """Whether an online teacher's layout is not the student's."""
    own = recipe.teacher.parallelism
    return recipe.teacher.mode == "online" and own is not None and own != recipe.parallelism.whole_stages


def teacher_layout(recipe: Recipe) -> Layout:
    """The layout of an online teacher: its micro batches are as large as the student's, their number is rounded up."""
    layout = Layout.of(recipe.in_teacher_layout()).of_teacher
    rows = math.ceil(recipe.training.global_batch_size / layout.dp)
    return replace(layout, microbatches=math.ceil(rows / layout.micro_rows))


def teacher_memory(recipe: Recipe, student: Layout, stage: int) -> TeacherMemory:
    """Of one of the student's stages; nothing offline."""
    if recipe.teacher.mode != "online":
        return TeacherMemory()
    layout, model, own = teacher_layout(recipe), recipe.teacher.model, has_own_layout(recipe)
    full, last = recipe.teacher.targets == "full", stage == student.pp - 1
    # The head in the student's split: of a teacher in another layout a copy, beside which it has none of its own.
    head = _head(recipe, student) if full and last else 0.0
    held = _answers(recipe, student, together=_together(recipe, student)) if last else 0.0
    kept, passing, host = 0.0, 0.0, 0.0
    for beside in _stages_beside(student, layout, stage):
        ends = beside == layout.pp - 1
        weights = float(rank_parameters(model, layout, beside).total * layout.itemsize)
        if own and full and ends and (model.untie_embeddings_and_output_weights or layout.pp > 1):
            weights -= _head(recipe, layout)
        stay = head if not own else 0.0
        moved = weights - stay if recipe.teacher.offload else 0.0
        forward = stage_activations(model, layout, Recomputation(), beside).forward
        if ends and not full:
            forward = max(forward, _extraction(recipe, layout))
        # For a moment what a rank sends and what it gets lie there twice.
        sent = 2 * _answers(recipe, layout, together=layout.microbatches) + held if own and ends else 0.0
        kept = max(kept, weights - moved + (head if own else 0.0))
        passing, host = max(passing, moved + forward + sent), max(host, moved)
    return TeacherMemory(kept, held, passing, host)


def teacher_seconds(recipe: Recipe, student: Layout, gpu: GPU, passes: float) -> float:
    """What a teacher's pass takes beside its forward passes: its answers' way, and what is left of its weights'.

    Args:
        passes: the forward passes; layer by layer the weights are copied beside them.
    """
    seconds = 0.0
    layout = teacher_layout(recipe)
    if has_own_layout(recipe):
        seconds += answer_exchange(_answers(recipe, student, together=student.microbatches), student, gpu)
    if recipe.teacher.offload:
        moved = max(teacher_memory(recipe, student, stage).host for stage in range(student.pp))
        copy = moved / (HOST_LINK * gpu.host_bandwidth)
        first = copy / (recipe.teacher.model.num_layers // layout.pp)  # nothing runs beside the first layer's
        seconds += max(first, copy - passes)
    return seconds


def _stages_beside(student: Layout, teacher: Layout, stage: int) -> range:
    """The teacher's stages on the ranks of one of the student's; both number consecutive ranks."""
    ranks, theirs = student.world // student.pp, teacher.world // teacher.pp
    last = ((stage + 1) * ranks - 1) // max(theirs, 1)
    return range(min(stage * ranks // max(theirs, 1), teacher.pp - 1), min(last, teacher.pp - 1) + 1)


def _together(recipe: Recipe, student: Layout) -> int:
    """Micro batches whose answers a rank has at once."""
    at_once = student.pp > 1 or has_own_layout(recipe) or recipe.teacher.offload
    return student.microbatches if at_once else 1


def _answers(recipe: Recipe, layout: Layout, *, together: int) -> float:
    """For so many micro batches of one rank of a layout; the one that the loss has in hand is part of its workspace."""
    if recipe.teacher.targets == "full":
        return together * layout.slice_tokens * recipe.teacher.model.hidden_size * layout.itemsize
    return (together if together > 1 else 0) * layout.tokens * (8 * recipe.teacher.top_k + 4)


def _head(recipe: Recipe, layout: Layout) -> float:
    rows = padded_vocab_size(recipe.teacher.model.vocab_size, layout.tp) // layout.tp
    return rows * recipe.teacher.model.hidden_size * layout.itemsize


def _extraction(recipe: Recipe, layout: Layout) -> float:
    """The chunk of logits a teacher picks its top K from."""
    if recipe.loss.chunk_mib is not None:
        return recipe.loss.chunk_mib * 2**20
    shape = LossShape.of(recipe, layout)
    return min(default_budget(shape), shape.tokens * shape.rows * 4)
