"""How a recipe's work is spread: group sizes, where groups lie, and the tokens of one micro batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_kd.config import Recipe


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups, and of the portion of work that one rank does at a time.

    Attributes:
        dp: copies of the model that see different rows.
        microbatches: of one data-parallel rank in a step.
        row_tokens: positions of a whole row.
        micro_rows: rows of a micro batch.
        itemsize: bytes of a weight and of an activation.
        vp: chunks of the student on each pipeline stage, interleaved where there are several.
    """

    world: int
    gpus_per_node: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    microbatches: int
    micro_rows: int
    row_tokens: int
    itemsize: int
    vp: int = 1

    @staticmethod
    def of(recipe: Recipe) -> Layout:
        """The layout of a recipe; a world that is no multiple of the model is rounded down."""
        sizes, training = recipe.parallelism, recipe.training
        dp = max(recipe.world_size // sizes.model_parallel_size, 1)
        return Layout(
            world=recipe.world_size,
            gpus_per_node=recipe.cluster.gpus_per_node,
            tp=sizes.tensor_model_parallel_size,
            pp=sizes.pipeline_model_parallel_size,
            cp=sizes.context_parallel_size,
            ep=sizes.expert_model_parallel_size,
            sequence_parallel=sizes.sequence_parallel,
            microbatches=max(training.global_batch_size // (training.micro_batch_size * dp), 1),
            micro_rows=training.micro_batch_size,
            row_tokens=recipe.data.seq_length,
            itemsize=2 if training.precision == "bf16" else 4,
            vp=sizes.chunks,
        )

    @property
    def of_teacher(self) -> Layout:
        """The same with whole stages, which a teacher always has."""
        return replace(self, vp=1)

    @property
    def dp(self) -> int:
        """Data-parallel ranks of the parameters outside experts."""
        return max(self.world // (self.tp * self.pp * self.cp), 1)

    @property
    def dense_shards(self) -> int:
        """Ranks that the optimizer's state of parameters outside experts is spread over: data and context parallel."""
        return self.dp * self.cp

    def expert_shards(self, has_experts: bool) -> int:
        """The same for experts, which belong to a group of their own: all ranks of a stage that hold the same ones."""
        return max(self.world // (self.pp * (self.ep if has_experts else 1)), 1)

    @property
    def tokens(self) -> int:
        """Positions of a micro batch on one context-parallel rank."""
        return self.micro_rows * self.row_tokens // self.cp

    @property
    def slice_tokens(self) -> int:
        """Of these, what one rank holds between the tensor-parallel regions."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    def in_flight(self, stage: int) -> int:
        """Micro batches, each in one chunk, whose activations a stage holds at once, in the schedule 1F1B.

        As many as go forward before the first goes backward (``get_pp_rank_microbatches`` of Megatron-Core), and one.
        """
        warmup = self.pp - stage - 1
        if self.vp > 1:
            warmup = 2 * warmup + (self.vp - 1) * self.pp
        return min(self.microbatches * self.vp, warmup + 1)

    def layers_of(self, stage: int, layers: int) -> list[int]:
        """Which of a model's layers, counted from 0, lie on a stage, chunk by chunk."""
        size = layers // (self.pp * self.vp)
        return [(chunk * self.pp + stage) * size + layer for chunk in range(self.vp) for layer in range(size)]

    # Megatron-Core numbers ranks tensor parallel first, then context (experts among those), data, pipeline parallel.
    def spans_nodes(self, ranks: int) -> bool:
        """Whether a group that covers so many consecutive ranks reaches beyond a node."""
        return ranks > self.gpus_per_node

    @property
    def pipeline_spans_nodes(self) -> bool:
        """Whether neighbouring stages lie on different nodes."""
        return self.pp > 1 and self.world > self.gpus_per_node
