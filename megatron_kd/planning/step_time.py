"""The time of a step, of its parts, and of a capture. Seconds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import ModelConfig, Recipe
from megatron_kd.config.gpus import GPU
from megatron_kd.models.step_flops import step_flops
from megatron_kd.planning import efficiency
from megatron_kd.planning.activations import layer_activations
from megatron_kd.planning.communication import gradient_reduction, layer_communication, stage_exchange
from megatron_kd.planning.device import device_of
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.loss_time import loss_time
from megatron_kd.planning.loss_workspace import LossShape, loss_workspace, resolved_mode
from megatron_kd.planning.parameters import rank_parameters
from megatron_kd.planning.recomputation import Recomputation
from megatron_kd.planning.teacher import teacher_layout, teacher_seconds
from megatron_kd.planning.work import layer_work, projection_flops

NOTHING = Recomputation()


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of all layers of one stage for one micro batch.

    Attributes:
        products: forward, matrix products and attention.
        elementwise: forward.
        exchange, exchange_backward: collectives that nothing hides.
        least: launching the kernels of a forward pass.
    """

    products: float
    elementwise: float
    elementwise_backward: float
    exchange: float
    exchange_backward: float
    least: float

    @property
    def forward(self) -> float:
        """A forward pass."""
        return max(self.products + self.elementwise, self.least) + self.exchange

    @property
    def backward(self) -> float:
        """A backward pass: two products for each of the forward pass."""
        return max(2 * self.products + self.elementwise_backward, 2 * self.least) + self.exchange_backward


def stage_times(model: ModelConfig, layout: Layout, gpu: GPU, stage: int) -> LayerTimes:
    """The layers of a stage."""
    layers = model.num_layers // layout.pp
    every = model.layer_windows()
    windows = [every[layer] for layer in layout.layers_of(stage, model.num_layers)]
    spread = model.num_moe_experts is not None and layout.ep > 1
    imbalance = efficiency.MOE_TIME_IMBALANCE if spread else 1.0
    products = sum(layer_work(model, layout, w).seconds(gpu, model.kv_channels, imbalance) for w in windows)
    kept = layers * layer_activations(model, layout, NOTHING).kept
    rate = efficiency.MEMORY_BANDWIDTH * gpu.memory_bandwidth
    exchange = layer_communication(model, layout, gpu)
    return LayerTimes(
        products=products,
        elementwise=efficiency.ELEMENTWISE_FORWARD * kept / rate,
        elementwise_backward=efficiency.ELEMENTWISE_BACKWARD * kept / rate,
        exchange=layers * exchange.forward,
        exchange_backward=layers * exchange.backward,
        least=layers * efficiency.LAYER_LAUNCH_S,
    )


@dataclass(frozen=True)
class StepTime:
    """A step.

    Attributes:
        parts: seconds by name; their sum is the step.
        student_flops: of the whole step, as metrics count them.
        executed_flops: those and what is repeated, and an online teacher's; see ``models/step_flops.py``.
        loss_flops: of all projections of the step, recomputed ones included.
        tokens: positions of a step.
    """

    parts: dict[str, float]
    student_flops: float
    executed_flops: float
    loss_flops: float
    tokens: int
    world: int
    peak_flops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tflops_per_gpu(self) -> float:
        """As ``perf/tflops_per_gpu``: the student's FLOPs, without recomputation and teacher."""
        return self.student_flops / self.seconds / self.world / 1e12

    @property
    def mfu(self) -> float:
        """Share of the dense peak that the student's FLOPs are."""
        return self.tflops_per_gpu * 1e12 / self.peak_flops

    @property
    def hfu(self) -> float:
        """Share of the dense peak that all executed FLOPs are."""
        return self.executed_flops / self.seconds / self.world / self.peak_flops

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds


def plan_step(recipe: Recipe) -> StepTime:
    """The time of an optimizer step; the slowest stage sets the pace of a pipeline."""
    layout, gpu = Layout.of(recipe), device_of(recipe)
    recomputation, model = Recomputation.of(recipe), recipe.student.model
    shape = LossShape.of(recipe, layout)
    mode = resolved_mode(recipe, shape)
    workspace = loss_workspace(shape, recipe.loss.implementation, mode, recipe.loss.chunk_mib)
    loss = loss_time(shape, recipe.loss.implementation, mode, workspace, gpu)
    stages = [stage_times(model, layout, gpu, stage) for stage in range(layout.pp)]
    again = [_recomputed(model, layout, gpu, recomputation, times) for times in stages]
    spent = [times.forward + times.backward + extra for times, extra in zip(stages, again, strict=True)]
    spent[-1] += loss.seconds
    slowest = max(range(layout.pp), key=spent.__getitem__)
    number = layout.microbatches
    times, is_last = stages[slowest], slowest == layout.pp - 1
    teacher = _teacher_seconds(recipe, gpu)
    parts = {
        "forward": number * (times.forward - times.exchange),
        "backward": number * (times.backward - times.exchange_backward),
        "recomputation": number * again[slowest],
        "loss": number * loss.seconds if is_last else 0.0,
        "communication": number * (times.exchange + times.exchange_backward + stage_exchange(model, layout, gpu)),
        # The pipeline fills and drains chunk by chunk.
        "pipeline_bubble": (layout.pp - 1) * spent[slowest] / layout.vp,
        "teacher": teacher,
        "teacher_transfer": teacher_seconds(recipe, layout, gpu, teacher) if recipe.teacher.mode == "online" else 0.0,
        "gradient_reduction": max(
            gradient_reduction(rank_parameters(model, layout, stage), layout, gpu) for stage in range(layout.pp)
        ),
        "optimizer": max(_optimizer_seconds(recipe, layout, gpu, stage) for stage in range(layout.pp)),
        "overhead": efficiency.STEP_OVERHEAD_S if recipe.cluster.gpu != "cpu" else 0.0,
    }
    tokens = recipe.training.global_batch_size * recipe.data.seq_length
    flops = step_flops(recipe)
    return StepTime(
        parts,
        flops.student,
        flops.executed,
        loss.flops * number * layout.tp * layout.dp * layout.cp,
        tokens,
        recipe.world_size,
        gpu.peak_flops,
    )


def _recomputed(model: ModelConfig, layout: Layout, gpu: GPU, recomputation: Recomputation, times: LayerTimes) -> float:
    """Seconds of the forward work that is done twice, exchanges included, in all layers of a stage."""
    layers = model.num_layers // layout.pp
    seconds = recomputation.repeated_share(layers // layout.vp) * times.forward
    share = 0.0
    if recomputation.recomputes("core_attn"):
        share += _share(model, layout, gpu, "attention")
    if recomputation.recomputes("mlp") or recomputation.recomputes("moe"):
        share += _share(model, layout, gpu, "feed_forward")
    seconds += share * times.products
    if recomputation.recomputes("moe"):
        seconds += layers * layer_communication(model, layout, gpu).expert
    for module, part in (("moe_act", 0.4), ("layernorm", 0.1), ("moe", 0.7), ("mlp", 0.5)):
        if recomputation.recomputes(module):  # shares of what a layer keeps
            seconds += part * times.elementwise
    return seconds


def _share(model: ModelConfig, layout: Layout, gpu: GPU, part: str) -> float:
    """Of the time of a model's products what attention, or experts and feed-forward parts, take."""
    total = wanted = 0.0
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    projections = 2 * layout.tokens / layout.tp * (model.hidden_size * (2 * q + 2 * kv))
    for window in model.layer_windows():
        work = layer_work(model, layout, window)
        seconds = work.seconds(gpu, model.kv_channels, 1.0)
        attention = seconds - (work.dense / efficiency.DENSE_GEMM + work.experts / efficiency.GROUPED_GEMM) / (
            gpu.peak_flops
        )
        outside = projections / efficiency.DENSE_GEMM / gpu.peak_flops
        total += seconds
        wanted += attention if part == "attention" else seconds - attention - outside
    return wanted / total


def _teacher_seconds(recipe: Recipe, gpu: GPU) -> float:
    """An online teacher's forward passes; its head is part of the loss, with top-K targets of an extraction."""
    if recipe.teacher.mode != "online":
        return 0.0
    teacher, layout = recipe.teacher.model, teacher_layout(recipe)
    slowest = max(stage_times(teacher, layout, gpu, stage).forward for stage in range(layout.pp))
    if recipe.teacher.targets == "top_k":
        slowest += extraction_seconds(teacher, layout, gpu)
    return (layout.microbatches + layout.pp - 1) * (slowest + stage_exchange(teacher, layout, gpu) / 2)


def extraction_seconds(teacher: ModelConfig, layout: Layout, gpu: GPU) -> float:
    """The top K of one micro batch: a projection, and four passes over float32 logits."""
    logits = layout.tokens * -(-teacher.vocab_size // layout.tp)
    return projection_flops(teacher, layout) / (efficiency.LOSS_GEMM * gpu.peak_flops) + 16 * logits / (
        efficiency.MEMORY_BANDWIDTH * gpu.memory_bandwidth
    )


def _optimizer_seconds(recipe: Recipe, layout: Layout, gpu: GPU, stage: int) -> float:
    """Gradient, copy and two moments read, three written back, the weight written; the norm reads gradients before."""
    held = rank_parameters(recipe.student.model, layout, stage)
    shard = held.dense_buffer / layout.dense_shards + held.experts_buffer / layout.expert_shards(held.experts > 0)
    moved = held.buffer * 4 + shard * (4 + 4 + 24 + layout.itemsize)
    return moved / (efficiency.MEMORY_BANDWIDTH * gpu.memory_bandwidth)


def capture_seconds(recipe: Recipe, tokens: int) -> float:
    """A capture of so many tokens by all ranks of the recipe, in the teacher's layout: its forward pass and top K."""
    gpu = device_of(recipe)
    training = recipe.training.model_copy(
        update={"micro_batch_size": recipe.teacher.capture.micro_batch_size, "global_batch_size": 1}
    )
    layout = Layout.of(recipe.in_teacher_layout().model_copy(update={"training": training})).of_teacher
    teacher = recipe.teacher.model
    slowest = max(stage_times(teacher, layout, gpu, stage).forward for stage in range(layout.pp))
    slowest += extraction_seconds(teacher, layout, gpu)
    rows = tokens / recipe.data.seq_length
    return rows / (layout.micro_rows * layout.dp) * slowest
