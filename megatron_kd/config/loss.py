"""The distillation loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_kd.config.base import Section
from megatron_kd.config.roles import TeacherConfig

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "tvd"]
TailName = Literal["bucket", "renormalize_teacher", "renormalize_both", "truncate"]

# Tails that are not defined for every divergence: those they are defined for, and why not for others. The losses hold
# the same table; this room does not import torch, so a test compares the two.
RESTRICTED_TAILS: dict[TailName, tuple[tuple[DivergenceName, ...], str]] = {
    "renormalize_teacher": (
        ("forward_kl", "jsd", "tvd"),
        "the teacher has no mass outside its cached tokens, the student has, and KL(student ‖ teacher) is infinite",
    ),
    "truncate": (
        ("forward_kl",),
        "the truncated rows are no distributions, and only the forward KL's sum over the cached tokens means something",
    ),
}


class LossConfig(Section):
    """Which divergence between teacher and student is minimised, and by which of the equal methods."""

    implementation: Literal["fused", "dense", "forward_chunked"] = "fused"
    """Equal in value and gradient; dense holds all logits, forward_chunked saves them chunk by chunk, fused never."""
    divergence: DivergenceName = "forward_kl"
    """forward_kl: KL(teacher ‖ student); reverse_kl: KL(student ‖ teacher); jsd: Jensen-Shannon with beta; tvd: total
    variation."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of jsd, strictly between 0 and 1; without effect otherwise."""
    tail: TailName = "bucket"
    """Mass outside the top-K: bucket makes it one outcome, renormalize_* drop it and rescale, truncate omits it. With
    teacher.targets full it has an effect only where a cache measures the held-out rows."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of both models; offline it must be one of teacher.temperatures."""
    scale_by_t2: bool = True
    """Multiply by temperature², which keeps the size of the gradients (Hinton et al. 2015)."""
    ce_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share w of the cross-entropy with the true next token: the loss is (1 − w)·divergence + w·cross-entropy."""
    mode: Literal["auto", "single_pass", "recompute"] = "auto"
    """How fused makes its gradient: within the forward pass (single_pass) or in the backward pass (recompute). The
    loss's other two modes follow from what is asked of it: no_grad in evaluation, frozen_head where the head is not
    trained, which no recipe asks for."""
    chunk_mib: Annotated[float, Field(ge=2**-10, le=2**20)] | None = None
    """Memory for the logits of one chunk, in MiB. null: 64 on a CPU, 1536 on a GPU."""
    gradient_mib: Annotated[float, Field(ge=0, le=2**20)] | None = None
    """Most memory in MiB that a single pass may hold from forward to backward, for all microbatches in flight together;
    above it mode auto recomputes. null: any for one microbatch in flight, none for more."""

    @field_validator("beta")
    @classmethod
    def _inner_beta(cls, beta: float) -> float:
        if not 0 < beta < 1:
            raise ValueError(
                f"{beta} must lie strictly between 0 and 1: the limits of jsd are 0, not the forward and reverse KL; "
                "for those set loss.divergence to 'forward_kl' or 'reverse_kl'"
            )
        return beta

    @model_validator(mode="after")
    def _defined_tail(self) -> Self:
        # Asked of an online recipe too: its held-out rows may be measured by a cache.
        if self.tail in RESTRICTED_TAILS:
            fitting, why = RESTRICTED_TAILS[self.tail]
            if self.divergence not in fitting:
                raise ValueError(
                    f"tail {self.tail!r} is not defined for divergence {self.divergence!r}: {why}; set loss.tail to "
                    f"'bucket' or 'renormalize_both', or loss.divergence to {' or '.join(map(repr, fitting))}"
                )
        return self

    def problems(self, teacher: TeacherConfig) -> Iterator[str]:
        """What is wrong between this loss and the teacher's targets."""
        if teacher.mode == "offline" and self.temperature not in teacher.temperatures:
            yield (
                f"loss.temperature {self.temperature} is not among the captured teacher.temperatures "
                f"{teacher.temperatures}: change loss.temperature, or add it there and capture again"
            )
        if teacher.mode == "online" and teacher.targets == "top_k" and self.temperature != teacher.temperatures[0]:
            yield (
                f"loss.temperature {self.temperature} must be the first of teacher.temperatures "
                f"{teacher.temperatures}, at which an online teacher picks its top_k: set teacher.temperatures to "
                f"[{self.temperature}]"
            )
