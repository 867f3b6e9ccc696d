"""The distillation loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megatron_kd.config.base import Section
from megatron_kd.config.roles import TeacherConfig


class LossConfig(Section):
    """Which divergence between teacher and student is minimised, and by which of the equal methods."""

    implementation: Literal["fused", "dense", "forward_chunked"] = "fused"
    """Equal in value and gradient; dense holds all logits, forward_chunked saves them chunk by chunk, fused never."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tvd"] = "forward_kl"
    """forward_kl: KL(teacher ‖ student); the others are not available yet."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of jsd; without effect otherwise."""
    tail: Literal["bucket", "renormalize_teacher", "renormalize_both", "truncate"] = "bucket"
    """Mass outside the top-K: bucket makes it one outcome, renormalize_* drop it and rescale, truncate omits it."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of both models; offline it must be one of teacher.temperatures."""
    scale_by_t2: bool = True
    """Multiply by temperature², which keeps the size of the gradients (Hinton et al. 2015)."""
    ce_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share w of the cross-entropy with the true next token: the loss is (1 − w)·divergence + w·cross-entropy."""
    mode: Literal["auto", "single_pass", "recompute"] = "auto"
    """How fused makes its gradient: within the forward pass (single_pass) or in the backward pass (recompute)."""
    chunk_mib: Annotated[float, Field(ge=2**-10, le=2**20)] = 64.0
    """Memory for one chunk of logits, in MiB."""

    @field_validator("divergence")
    @classmethod
    def _available_divergence(cls, divergence: str) -> str:
        if divergence != "forward_kl":
            raise ValueError(f"{divergence!r} is not available yet: use 'forward_kl'")
        return divergence

    def problems(self, teacher: TeacherConfig) -> Iterator[str]:
        """What is wrong between this loss and the teacher's targets."""
        if teacher.mode == "offline" and self.temperature not in teacher.temperatures:
            yield (
                f"loss.temperature {self.temperature} is not among the captured teacher.temperatures "
                f"{teacher.temperatures}: change loss.temperature, or add it there and capture again"
            )
