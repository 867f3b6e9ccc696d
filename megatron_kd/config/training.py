"""The training run: batches, optimizer, checkpoints, logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import Section
from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.model import ModelConfig, Positive
from megatron_kd.config.recompute import RecomputeModule, recompute_problems, with_recompute_defaults

NonNegative = Annotated[int, Field(ge=0)]


class TrainingConfig(Section):
    """How much is trained, in which portions and which arithmetic."""

    global_batch_size: Positive
    """Rows in one optimizer step, over all ranks."""
    micro_batch_size: Positive = 1
    """Rows in one forward pass of one data-parallel rank."""
    train_iters: Positive
    """Optimizer steps in all."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the models; the optimizer keeps float32 master weights."""
    eval_interval: NonNegative = 0
    """Evaluate on the held-out split every so many steps; 0: never during training."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of each rank; null: chosen from the machine."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """What the student's backward pass computes again instead of keeping it: whole layers (full: the least memory), or
    recompute_modules of every layer (selective); null: nothing. The loss never is."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of full: every layer, in units of recompute_num_layers (uniform, the default), or the first recompute_num_layers
    of each pipeline stage (block)."""
    recompute_num_layers: Positive | None = None
    """Of full: layers of a unit, or of a stage; by default 1."""
    recompute_modules: Annotated[list[RecomputeModule], Field(min_length=1)] | None = None
    """Of selective: core_attn (the default), mlp (of models without experts), moe (the router and all experts); with
    Transformer Engine also layernorm and moe_act (the experts' activation)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        return with_recompute_defaults(values) if isinstance(values, dict) else values

    def problems(self, cluster: ClusterConfig, parallelism: ParallelismConfig, student: ModelConfig) -> Iterator[str]:
        """What is wrong between batch, layout and recomputation."""
        dp = max(cluster.world_size // parallelism.model_parallel_size, 1)
        portion = self.micro_batch_size * dp
        if self.global_batch_size % portion:
            yield (
                f"training.global_batch_size {self.global_batch_size} must be a multiple of training.micro_batch_size "
                f"{self.micro_batch_size} × dp {dp} = {portion}: use "
                f"{max(round(self.global_batch_size / portion), 1) * portion}"
            )
        yield from recompute_problems(self, cluster, parallelism, student)


class OptimizerConfig(Section):
    """Megatron-Core's optimizer and learning-rate schedule."""

    optimizer: Literal["adam"] = "adam"
    """Adam with decoupled weight decay (AdamW)."""
    lr: Annotated[float, Field(gt=0)]
    """Highest learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Lowest learning rate of the decay."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_warmup_iters: NonNegative = 0
    """Steps in which the learning rate rises from 0 to lr."""
    lr_decay_iters: Positive | None = None
    """Step at which min_lr is reached; null: training.train_iters."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, not applied to biases and norms."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of the gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of their squares."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0: no clipping."""

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is more than lr {self.lr}: lower optimizer.min_lr")
        return self

    def problems(self, training: TrainingConfig) -> Iterator[str]:
        """What is wrong between the schedule and the length of the run."""
        end, key = self.lr_decay_iters, "optimizer.lr_decay_iters"
        if end is None:
            end, key = training.train_iters, "training.train_iters"
        # Megatron-Core's schedule needs at least one step of decay behind the warm-up.
        if self.lr_warmup_iters >= end:
            yield f"optimizer.lr_warmup_iters {self.lr_warmup_iters} must be less than {key} {end}: lower the warm-up"


class CheckpointConfig(Section):
    """Checkpoints of the training run, in its run directory."""

    save_interval: Positive | None = None
    """Steps between two checkpoints; null: only at the end and on a signal."""
    keep: Positive = 3
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """Write checkpoints while the training goes on. Until one is written, the first data-parallel rank of each part of
    the model holds a copy of it in host memory: 14 bytes a parameter in bf16, 16 in fp32."""
    on_damage: Literal["refuse", "previous"] = "refuse"
    """A damaged newest checkpoint: refuse to go on, or go back to the one before it, with a warning."""


class WandbConfig(Section):
    """The view of a run in Weights & Biases."""

    project: Annotated[str, Field(min_length=1)]
    """Project; runs to be laid over each other share it."""
    group: str | None = None
    """Group within the project."""
    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline writes into the run directory, for ``wandb sync`` later."""
    entity: str | None = None
    """Team or user; null: the account's default."""


class LoggingConfig(Section):
    """Metrics; ``metrics.jsonl`` in the run directory is always written."""

    log_interval: Positive = 1
    """Steps between two lines of metrics."""
    wandb: WandbConfig | None = None
    """null: no Weights & Biases."""
