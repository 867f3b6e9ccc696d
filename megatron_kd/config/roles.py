"""The two models of a distillation: the teacher, with how its targets are made, and the student."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import PathString, Section
from megatron_kd.config.layout import ParallelismConfig
from megatron_kd.config.model import ModelConfig, Positive


class CaptureConfig(Section):
    """How ``capture`` runs the teacher over the samples."""

    rows_per_shard: Positive | None = None
    """Rows in one shard, the unit in which a capture resumes; null: chosen from the size of a row."""
    micro_batch_size: Positive = 1
    """Rows in one forward pass of the teacher."""
    value_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Storage of the cached log-probabilities; bfloat16 takes 13 % less space at eight times the rounding."""


class HFEngineConfig(Section):
    """How the engine hf loads the teacher."""

    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """How transformers spreads the layers over the GPUs of a node; null: each rank on its own GPU."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Arithmetic of the teacher; null: training.precision."""


class VLLMEngineConfig(Section):
    """How the engine vllm loads the teacher."""

    tensor_parallel_size: Positive = 1
    """GPUs of a node that vLLM spreads the teacher over; above 1 it needs one rank on each node."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Arithmetic of the teacher; null: training.precision. vLLM rounds the logits to it as well."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Part of each GPU's memory that vLLM takes."""
    max_num_batched_tokens: Positive | None = None
    """Tokens in one step of vLLM, for each of which it holds all logits; null: its own choice. Lower it where memory
    runs out."""


class TeacherConfig(Section):
    """The model that is imitated, and how its targets reach the student."""

    mode: Literal["offline", "online"]
    """offline: targets come from the cache; online: the teacher runs in every training step."""
    model: ModelConfig
    """Architecture, or in a file the name of one (``configs/models/<name>.yaml``)."""
    engine: Literal["megatron", "hf", "vllm"] = "megatron"
    """What runs the teacher in a capture: Megatron-Core on teacher.checkpoint, in its layout; or transformers
    or vLLM on model.hf, any causal language model they know, whole on each rank: without model parallelism."""
    hf: HFEngineConfig = HFEngineConfig()
    vllm: VLLMEngineConfig = VLLMEngineConfig()
    checkpoint: PathString | None = None
    """Megatron distributed checkpoint of the teacher, imported from model.hf."""
    cache: PathString | None = None
    """Folder of the cache; needed offline."""
    top_k: Positive = 100
    """Tokens kept for each position."""
    temperatures: list[Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: [1.0], min_length=1)
    """Softmax temperatures captured into the cache."""
    targets: Literal["full", "top_k"]
    """What the teacher hands over: its whole distribution (online only, the default there) or its top_k."""
    capture: CaptureConfig = CaptureConfig()
    parallelism: ParallelismConfig | None = None
    """The teacher's own layout over the same ranks, online and in a capture; null: the recipe's parallelism. Online its
    answers are then sent to the ranks of the student that need them, a global batch at a time."""
    offload: bool = False
    """Online only: between its passes the teacher's weights lie in the host's memory (pinned, each rank its shard), and
    the device's is free for the student. The global batch is scored first, in one go."""

    @model_validator(mode="before")
    @classmethod
    def _default_targets(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("targets") is None:
            return {**values, "targets": "full" if values.get("mode") == "online" else "top_k"}
        return values

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "offline" and self.cache is None:
            raise ValueError("mode offline needs the folder of a cache: set teacher.cache, or teacher.mode to online")
        if self.mode == "offline" and self.targets == "full":
            raise ValueError("mode offline has only the cached top_k: remove teacher.targets, or set mode to online")
        if self.engine != "megatron" and self.mode == "online":
            raise ValueError(
                f"engine {self.engine!r} only captures, it cannot run within training steps: set teacher.engine to "
                "'megatron', or teacher.mode to offline"
            )
        if self.mode == "offline" and self.offload:
            raise ValueError(
                "offload is set, but mode offline has no teacher in its steps: remove teacher.offload, or set mode to "
                "online"
            )
        for engine, section in (("hf", self.hf), ("vllm", self.vllm)):
            if self.engine != engine and section != type(section)():
                raise ValueError(
                    f"{engine} is set, but engine is {self.engine!r}, which does not read it: set teacher.engine to "
                    f"{engine!r}, or remove teacher.{engine}"
                )
        if self.engine == "vllm" and self.temperatures != [1.0]:
            raise ValueError(
                f"temperatures are {self.temperatures}, but vLLM tells log-probabilities of prompts at temperature 1 "
                "alone, and no normalizers of others: set teacher.temperatures to [1.0], or teacher.engine to 'hf'"
            )
        if self.top_k > self.model.vocab_size:
            raise ValueError(
                f"top_k {self.top_k} is more than the vocabulary of {self.model.vocab_size}: lower teacher.top_k"
            )
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} holds a value twice: remove one")
        return self


Indices = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class FromTeacherConfig(Section):
    """A student cut out of the teacher: of its layers, experts, FFN rows and query groups, those that are kept.

    What no key speaks of is kept whole. How parts are chosen by size or use: docs/checkpoints.md, "A student cut out of
    its teacher".
    """

    keep_layers: Indices | None = None
    """Teacher layers kept, counted from 0, in rising order; with no keep_every either: all."""
    keep_every: Positive | None = None
    """Keep the layers 0, n, 2n, …"""
    keep_experts: Indices | None = None
    """Experts kept in each layer, counted from 0, in rising order."""
    num_moe_experts: Positive | None = None
    """Keep so many experts of each layer: those that get most of the router's probability on calibration rows."""
    calibration_samples: Positive = 64
    """First rows of the training split on which num_moe_experts measures the router."""
    ffn_hidden_size: Positive | None = None
    """Keep so many FFN rows of each layer (of each expert): those with the largest weights."""
    num_query_groups: Positive | None = None
    """Keep so many key-value heads of each layer, with all their query heads: those that write most."""

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        for one, other in (("keep_layers", "keep_every"), ("keep_experts", "num_moe_experts")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} both say what is kept: give at most one of them")
        for key in ("keep_layers", "keep_experts"):
            kept = getattr(self, key)
            if kept is not None and sorted(set(kept)) != kept:
                raise ValueError(f"{key} {kept} must be distinct and in rising order")
        default = type(self).model_fields["calibration_samples"].default
        if self.num_moe_experts is None and self.calibration_samples != default:
            raise ValueError(
                f"calibration_samples is {self.calibration_samples}, but only num_moe_experts measures the router: "
                "give num_moe_experts, or remove calibration_samples"
            )
        return self

    def layers(self, teacher_layers: int) -> list[int]:
        """Indices of the kept layers, rising. Raises ValueError where one is not a layer of the teacher."""
        if self.keep_layers is None:
            return list(range(0, teacher_layers, self.keep_every or 1))
        if self.keep_layers[-1] >= teacher_layers:
            raise ValueError(
                f"from_teacher.keep_layers holds {self.keep_layers[-1]}, "
                f"but the teacher has the layers 0 to {teacher_layers - 1}"
            )
        return self.keep_layers

    def cut(self, teacher: ModelConfig) -> ModelConfig:
        """The student's architecture. Raises ValueError where something to keep is not in the teacher."""
        layers = self.layers(teacher.num_layers)
        wanted = self.num_moe_experts
        if self.keep_experts is not None:
            last = self.keep_experts[-1]
            if last >= (teacher.num_moe_experts or 0):
                there = teacher.num_moe_experts or "no"
                raise ValueError(f"from_teacher.keep_experts holds {last}, but the teacher has {there} experts")
            wanted = len(self.keep_experts)
        return teacher.cut(
            layers,
            num_moe_experts=wanted,
            ffn_hidden_size=self.ffn_hidden_size,
            num_query_groups=self.num_query_groups,
        )


class StudentConfig(Section):
    """The model that is trained."""

    model: ModelConfig
    """Architecture or its name; without it the teacher's, cut as from_teacher says where that is given."""
    checkpoint: PathString | None = None
    """Megatron distributed checkpoint to start from; null with no from_teacher: random weights."""
    from_teacher: FromTeacherConfig | None = None
    """Start from a part of the teacher."""
    other_vocabulary: Literal["refuse", "fold"] = "refuse"
    """Where the two vocabularies have different sizes (of one tokenizer, padded differently): refuse; or fold: a
    teacher's ids beyond the student's vocabulary are dropped and their mass joins the tail."""

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if self.checkpoint is not None and self.from_teacher is not None:
            raise ValueError(
                "checkpoint and from_teacher both say where the weights come from: set one of them to null"
            )
        return self

    def resolved(self, teacher: ModelConfig) -> StudentConfig:
        """The student with the architecture that from_teacher implies. Raises ValueError on a contradiction."""
        if self.from_teacher is None:
            return self
        cut = self.from_teacher.cut(teacher)
        if self.model not in (teacher, cut):
            given, made = self.model.model_dump(), cut.model_dump()
            keys = [key for key in made if given[key] != made[key]]
            keys = [key for key in keys if key not in ("name", "hf")] or keys
            unlike = ", ".join(f"{key} {given[key]!r} (not {made[key]!r})" for key in keys)
            raise ValueError(
                f"model has {unlike}, unlike the cut of the teacher that from_teacher makes: "
                "set student.model or student.from_teacher to null"
            )
        return self.model_copy(update={"model": cut})

    def problems(self, teacher: TeacherConfig) -> Iterator[str]:
        """What is wrong between this student and its teacher."""
        if self.model.vocab_size == teacher.model.vocab_size:
            return
        differ = (
            f"student.model.vocab_size {self.model.vocab_size} and teacher.model.vocab_size "
            f"{teacher.model.vocab_size} differ"
        )
        if self.other_vocabulary == "refuse":
            yield (
                f"{differ}: both distributions must be over the same tokens; where it is one tokenizer and the rest is "
                "padding, set student.other_vocabulary to 'fold'"
            )
        elif teacher.targets == "full":
            yield f"{differ}, and whole distributions cannot be folded: set teacher.targets to 'top_k'"
