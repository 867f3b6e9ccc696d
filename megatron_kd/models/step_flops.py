"""Floating-point operations of an optimizer step, over all ranks: those of the models, and those that are executed.

MFU and TFLOP/s divide the student's own operations (forward and backward once, whatever the method), so that methods
and recipes compare. HFU divides what the hardware really multiplies: projections that a loss repeats or leaves out,
layers that are recomputed, and an online teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_kd.config import Recipe
from megatron_kd.losses.sizes import single_pass_fits
from megatron_kd.models.flops import LayerFlops, forward_flops_per_token, head_flops, layer_flops

PROJECTIONS = {"single_pass": 3, "recompute": 4}
"""By the student's head in ``fused``; ``dense`` and ``forward_chunked`` keep their logits: 3. The teacher's head
projects once for each time that the logits are made."""


@dataclass(frozen=True)
class StepFlops:
    """One optimizer step, over all ranks.

    Attributes:
        student: the model's: 3 × its forward pass at every position, head included. What TFLOP/s and MFU divide.
        teacher: an online teacher's forward pass at every position, head included; 0 offline.
        student_body: executed in the student's layers, forward and backward.
        recomputation: executed in its layers once more, as ``training.recompute_*`` say.
        student_head: executed by its head: fused leaves masked positions out, and projects again in ``recompute``.
        teacher_body, teacher_head: executed by an online teacher.
    """

    student: float
    teacher: float
    student_body: float
    recomputation: float
    student_head: float
    teacher_body: float
    teacher_head: float

    @property
    def executed(self) -> float:
        """All of it. What HFU divides."""
        return self.student_body + self.recomputation + self.student_head + self.teacher_body + self.teacher_head


def step_flops(recipe: Recipe, trained_tokens: int | None = None, documents: Sequence[int] | None = None) -> StepFlops:
    """The operations of a recipe's step.

    Args:
        trained_tokens: positions of the step whose prediction trains; None: all.
        documents: lengths of the documents of packed rows where each sees itself alone; None: whole rows.
    """
    length, student, teacher = recipe.data.seq_length, recipe.student.model, recipe.teacher.model
    positions = recipe.training.global_batch_size * length
    layers = layer_flops(student, length, documents)
    fused = recipe.loss.implementation == "fused"
    projected = positions if trained_tokens is None or not fused else trained_tokens
    projections = PROJECTIONS[loss_mode(recipe)] if fused else 3
    online = recipe.teacher.mode == "online"
    teacher_forward = positions * forward_flops_per_token(teacher, length, documents) if online else 0.0
    whole_teacher_head = positions * head_flops(teacher) if online else 0.0
    teacher_head = whole_teacher_head
    if online and recipe.teacher.targets == "full":
        teacher_head = (projections - 2) * projected * head_flops(teacher)
    return StepFlops(
        student=3 * positions * (sum(layer.total for layer in layers) + head_flops(student)),
        teacher=teacher_forward,
        student_body=3 * positions * sum(layer.total for layer in layers),
        recomputation=positions * _recomputed(recipe, layers),
        student_head=projections * projected * head_flops(student),
        teacher_body=teacher_forward - whole_teacher_head,
        teacher_head=teacher_head,
    )


def loss_mode(recipe: Recipe) -> str:
    """``loss.mode`` of the fused loss as it decides for a head that trains, one micro batch in flight."""
    if recipe.loss.mode != "auto":
        return recipe.loss.mode
    sizes, student = recipe.parallelism, recipe.student.model
    tokens = recipe.training.micro_batch_size * recipe.data.seq_length // sizes.context_parallel_size
    if sizes.sequence_parallel:
        tokens //= sizes.tensor_model_parallel_size
    shard = -(-student.vocab_size // sizes.tensor_model_parallel_size)
    itemsize = 2 if recipe.training.precision == "bf16" else 4
    held = shard * student.hidden_size * 4 + tokens * student.hidden_size * itemsize
    limit = None if recipe.loss.gradient_mib is None else int(recipe.loss.gradient_mib * 2**20)
    return "single_pass" if single_pass_fits(held, 1, limit) else "recompute"


def _recomputed(recipe: Recipe, layers: Sequence[LayerFlops]) -> float:
    """What the backward pass repeats of the layers for one token."""
    training = recipe.training
    if training.recompute_granularity == "full":
        if training.recompute_method != "block":
            return sum(layer.total for layer in layers)
        stages = recipe.parallelism.pipeline_model_parallel_size
        size, first = len(layers) // stages, training.recompute_num_layers or 1
        return sum(layer.total for index, layer in enumerate(layers) if index % size < first)
    modules = training.recompute_modules or () if training.recompute_granularity == "selective" else ()
    repeated = 0.0
    if "core_attn" in modules:
        repeated += sum(layer.attention for layer in layers)
    if "mlp" in modules or "moe" in modules:
        repeated += sum(layer.feed_forward for layer in layers)
    return repeated
