"""The training run: batches, optimizer, checkpoints, logging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import Section
from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.model import ModelConfig, Positive
from megatron_kd.config.offload import activation_offload_problems, optimizer_offload_problems
from megatron_kd.config.recompute import RecomputeModule, recompute_problems, with_recompute_defaults

NonNegative = Annotated[int, Field(ge=0)]
Minutes = Annotated[float, Field(gt=0, le=10080)]


class EarlyStoppingConfig(Section):
    """When a run ends before training.train_iters: the student no longer gets closer to its teacher."""

    patience: Positive
    """Evaluations (of training.eval_interval) without a better eval/kd after which the run saves and is finished."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An evaluation is better if its eval/kd is lower by more than this, in nats."""


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
    eval_details: bool = False
    """These evaluations measure all that the command evaluate does: top-5 agreement, calibration, the loss by position
    and by the teacher's entropy. It costs one more projection by the student's head."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of each rank; null: chosen from the machine."""

    on_nonfinite: Literal["skip", "stop"] = "stop"
    """A step whose loss or gradient is NaN or infinite is never taken; after it, go on with the next rows (skip), or
    save and end (stop)."""
    loss_spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A step whose loss is more than so many times the median of the last loss_spike_window steps is skipped; null:
    none is."""
    loss_spike_window: Annotated[int, Field(ge=2, le=1000)] = 32
    """Steps taken that a loss is compared with; before there are so many, none is a spike."""
    max_skipped_steps: NonNegative = 10
    """So many steps may be skipped in a row; at one more the run saves and ends."""
    cpu_offloading: bool = False
    """Keep activations of the student in the host's memory between forward and backward pass (Transformer Engine)."""
    cpu_offloading_num_layers: NonNegative = 0
    """Of cpu_offloading: so many layers, from the first; one at least stays on the GPU."""
    early_stopping: EarlyStoppingConfig | None = None
    """End on eval/kd, and keep the best checkpoint beside the newest; null: train all of train_iters."""
    memory_snapshot: bool = False
    """Record every allocation on a GPU and write logs/memory_rank_N.pickle where memory runs out; costs some time."""
    distributed_timeout_minutes: Minutes = 10.0
    """How long a collective may take before it is an error on all ranks."""
    hang_timeout_minutes: Minutes | None = 30.0
    """A rank that gets nothing done for so long (no micro batch, no step; four times as long while it starts, loads or
    saves) writes its stacks to its log and ends itself, and with it the job; null: it waits for ever."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """What the student's backward pass computes again instead of keeping it: whole layers (full: the least memory), or
    recompute_modules of every layer (selective); null: nothing. The loss never is."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of full: every layer, in units of recompute_num_layers (uniform, the default), or the first recompute_num_layers
    of each pipeline stage, or of each of its chunks (block)."""
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
        pp, chunks = parallelism.pipeline_model_parallel_size, parallelism.virtual_pipeline_model_parallel_size
        microbatches = self.global_batch_size // portion
        if chunks is not None and microbatches % pp and self.global_batch_size % portion == 0:
            rows = portion * pp
            yield (
                f"parallelism.virtual_pipeline_model_parallel_size {chunks} runs micro batches in groups of "
                f"parallelism.pipeline_model_parallel_size {pp}, but training.global_batch_size "
                f"{self.global_batch_size} makes {microbatches} of them on each data-parallel rank: use "
                f"{max(round(self.global_batch_size / rows), 1) * rows}, or set the former to null"
            )
        if self.early_stopping is not None and self.eval_interval == 0:
            yield (
                "training.early_stopping looks at the evaluations of training.eval_interval, which is 0: set "
                "eval_interval, or early_stopping to null"
            )
        yield from recompute_problems(self, cluster, parallelism, student)
        yield from activation_offload_problems(self, cluster, parallelism, student)


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
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in the host's memory, and update there."""
    optimizer_offload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of optimizer_cpu_offload: the share of the parameters; the rest is updated on the GPU."""

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is more than lr {self.lr}: lower optimizer.min_lr")
        return self

    def problems(self, training: TrainingConfig, cluster: ClusterConfig) -> Iterator[str]:
        """What is wrong between the schedule and the length of the run, and with what is offloaded."""
        yield from optimizer_offload_problems(self, training, cluster)
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
