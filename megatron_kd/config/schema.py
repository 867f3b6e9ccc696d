"""The recipe: everything that determines a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_kd.config.base import PathString, Section
from megatron_kd.config.data import DataConfig
from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.loss import LossConfig
from megatron_kd.config.profile import ProfileConfig
from megatron_kd.config.roles import StudentConfig, TeacherConfig
from megatron_kd.config.training import CheckpointConfig, LoggingConfig, OptimizerConfig, TrainingConfig

TEACHER_INVALID = "teacher_invalid"
"""Type of the error of a student that cannot be resolved because the teacher is wrong: not worth a message."""


class Recipe(Section):
    """One run, resolved: names of models replaced by architectures, defaults filled in, cross-checks passed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run: letters, digits, dot, underscore and hyphen."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of weights, row order and dropout."""
    run_dir: PathString
    """Folder of metrics, checkpoints and logs, relative to the current directory; null: runs/<name>."""
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig
    teacher: TeacherConfig
    student: StudentConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig | None = None
    """Profile some steps; null: none."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.cluster.world_size

    def in_teacher_layout(self) -> Recipe:
        """The recipe with the teacher's own layout, where it has one, in the place of the student's: for a capture."""
        if self.teacher.parallelism is None:
            return self
        teacher = self.teacher.model_copy(update={"parallelism": None})
        return self.model_copy(update={"parallelism": self.teacher.parallelism, "teacher": teacher})

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model: world / (tp·pp·cp)."""
        return self.cluster.world_size // self.parallelism.model_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one data-parallel rank in one optimizer step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size)

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if values.get("run_dir") is None and isinstance(values.get("name"), str):
            values["run_dir"] = f"runs/{values['name']}"
        if values.get("student") is None:
            values["student"] = {}
        return values

    @field_validator("student", mode="before")
    @classmethod
    def _default_student(cls, student: Any, info: ValidationInfo) -> Any:
        if isinstance(student, dict) and student.get("model") is None:
            if "teacher" not in info.data:
                raise PydanticCustomError(TEACHER_INVALID, "the student takes the teacher's model, which is wrong")
            return {**student, "model": info.data["teacher"].model}
        return student

    @field_validator("student", mode="after")
    @classmethod
    def _resolve_student(cls, student: StudentConfig, info: ValidationInfo) -> StudentConfig:
        if "teacher" not in info.data:
            return student
        return student.resolved(info.data["teacher"].model)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        problems = list(self._problems())
        if (info.context or {}).get("trains", True):
            problems += self.training.problems(self.cluster, self.parallelism, self.student.model)
            problems += [] if self.profile is None else self.profile.problems(self.cluster, self.training)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        models = {"teacher.model": self.teacher.model, "student.model": self.student.model}
        for where, model in models.items():
            if self.data.seq_length > model.max_position_embeddings:
                yield (
                    f"data.seq_length {self.data.seq_length} is more than {where}.max_position_embeddings "
                    f"{model.max_position_embeddings} ({model.name}): shorten data.seq_length"
                )
        yield from self.student.problems(self.teacher)
        own, cut = self.teacher.parallelism, self.student.from_teacher
        if own is not None:
            teacher = {"teacher.model": models["teacher.model"]}
            yield from own.problems(self.cluster, self.data.seq_length, teacher, "teacher.parallelism")
            if cut is None or cut.num_moe_experts is None:  # else the teacher's router is measured in this layout
                del models["teacher.model"]
        # An offline run never loads the teacher, but its capture does, with the same layout.
        yield from self.parallelism.problems(self.cluster, self.data.seq_length, models)
        yield from self.loss.problems(self.teacher)
        yield from self.optimizer.problems(self.training, self.cluster)
