"""The one place that builds a Megatron-Core model."""

from __future__ import annotations

import logging

import torch
from megatron.core.models.gpt import GPTModel

from megatron_kd.config import ModelConfig, ParallelismConfig
from megatron_kd.device import current_device
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.spec import layer_spec
from megatron_kd.models.transformer_config import Precision, params_dtype, transformer_config
from megatron_kd.models.vocabulary import padded_vocab_size

# Every construction warns that GPTModel gives way to another class; this module is where that will be changed.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_model(
    model: ModelConfig, parallelism: ParallelismConfig, groups: ParallelGroups, precision: Precision, *, trainable: bool
) -> GPTModel:
    """A randomly initialised model, this rank's shard of it, on this rank's device.

    The output layer keeps logits split over the vocabulary; the vocabulary is padded to 128 · TP rows.

    Args:
        trainable: False for a teacher: no gradients, evaluation mode.
    """
    config = transformer_config(model, parallelism, precision)
    built = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=padded_vocab_size(model.vocab_size, groups.tp_size),
        max_sequence_length=model.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=groups.collection,
    )
    built.to(device=current_device(), dtype=params_dtype(precision))
    if not trainable:
        built.requires_grad_(False)
        built.eval()
    return built


def parameter_count(built: torch.nn.Module) -> int:
    """Parameters held by this rank."""
    return sum(p.numel() for p in built.parameters())
