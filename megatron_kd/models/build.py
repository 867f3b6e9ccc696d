"""The one place that builds a Megatron-Core model."""

from __future__ import annotations

import logging

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_kd.config import ModelConfig, ParallelismConfig, TrainingConfig
from megatron_kd.config.rope import Llama3RopeScaling
from megatron_kd.device import current_device
from megatron_kd.models.chunks import Chunks, as_model
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.rope import llama3_frequencies, position_embedding_type, restart_at_documents
from megatron_kd.models.spec import layer_spec
from megatron_kd.models.transformer_config import Precision, params_dtype, transformer_config
from megatron_kd.models.vocabulary import padded_vocab_size

# Every construction warns that GPTModel gives way to another class; this module is where that will be changed.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_model(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    groups: ParallelGroups,
    precision: Precision,
    *,
    trainable: bool,
    initialize: bool = True,
    training: TrainingConfig | None = None,
) -> GPTModel:
    """A randomly initialised model, this rank's shard of it, on this rank's device. Its stages are not interleaved.

    The output layer keeps logits split over the vocabulary; the vocabulary is padded to 128 · TP rows.

    Args:
        trainable: False for a teacher: no gradients, evaluation mode.
        initialize: False where every parameter is filled next: their memory is then not touched before.
        training: says what the backward pass computes again; None: nothing.
    """
    config = transformer_config(model, parallelism, precision, training)
    config.perform_initialization = initialize
    return _ready(_build(model, config, groups), model, precision, trainable=trainable)


def build_chunks(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    groups: ParallelGroups,
    precision: Precision,
    *,
    training: TrainingConfig | None = None,
) -> GPTModel | Chunks:
    """A model to train, as ``build_model`` makes it, in chunks where the layout says so; they share one config."""
    number = parallelism.virtual_pipeline_model_parallel_size
    config = transformer_config(model, parallelism, precision, training, interleaved=number is not None)
    stages = [None] if number is None else range(number)
    built = [_ready(_build(model, config, groups, stage), model, precision, trainable=True) for stage in stages]
    together: GPTModel | Chunks = as_model(built)
    return together


def _ready(built: GPTModel, model: ModelConfig, precision: Precision, *, trainable: bool) -> GPTModel:
    built.to(device=current_device(), dtype=params_dtype(precision))
    if isinstance(model.rope_scaling, Llama3RopeScaling):
        built.rotary_pos_emb.inv_freq = llama3_frequencies(model, model.rope_scaling).to(current_device())
    restart_at_documents(built)
    _mark_experts(built)
    if not trainable:
        built.requires_grad_(False)
        built.eval()
    return built


def build_on_meta(model: ModelConfig, groups: ParallelGroups, parallelism: ParallelismConfig | None = None) -> GPTModel:
    """This rank's part of a model without memory for its weights, to count them. On the CPU's side.

    Args:
        parallelism: the layout of the groups; None: one rank.
    """
    config = transformer_config(model, parallelism or ParallelismConfig(), "bf16")
    config.use_cpu_initialization, config.perform_initialization = True, False
    with torch.device("meta"):
        return _build(model, config, groups)


def _build(
    model: ModelConfig, config: TransformerConfig, groups: ParallelGroups, vp_stage: int | None = None
) -> GPTModel:
    """This rank's stage, or where stages are interleaved the chunk ``vp_stage`` of it."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, groups.pp_rank, vp_stage),
        vocab_size=padded_vocab_size(model.vocab_size, groups.tp_size),
        max_sequence_length=model.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=position_embedding_type(model),
        pre_process=groups.is_first_stage and vp_stage in (None, 0),
        post_process=groups.is_last_stage and vp_stage in (None, chunks - 1),
        rotary_base=model.rotary_base,
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )


def _mark_experts(built: GPTModel) -> None:
    """Says of the experts' parameters what Megatron-Core leaves out, for gradients and for checkpoints.

    They see the tokens that were sent to them, whole, not a slice of every sequence: a gradient marked as sequence
    parallel would be summed over ranks that hold other experts. And they are reduced over the expert data-parallel
    group in every layout, so that the optimizer's state has the same structure in all.
    """
    for name, parameter in built.named_parameters():
        if ".mlp.experts." in name:
            parameter.sequence_parallel = False
            parameter.allreduce = False
    for module in built.modules():
        # Local experts add their bias in place to what this layer returns. With nothing to reduce that would be a view
        # made by an autograd function, which may not be changed; so it is told that no reduction is its business.
        if isinstance(module, RowParallelLinear) and module.is_expert and module.tp_group.size() == 1:
            module.explicit_expert_comm = True
