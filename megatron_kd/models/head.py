"""The output projection as an ``output_processor`` sees it. Vl rows of the head on this rank, D hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.device import current_device
from megatron_kd.models.checkpoint_tensors import CheckpointWeights
from megatron_kd.models.families import EMBEDDING, HEAD
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.parameters import Place


def head_of(output_layer: Any, output_weight: Tensor | None) -> Tensor:
    """This rank's shard [Vl, D] of the head: the tied embedding where it is handed over, else the layer's own."""
    weight: Tensor = output_weight if output_weight is not None else output_layer.weight
    if getattr(output_layer, "bias", None) is not None:
        raise ValueError("the output layer has a bias, which the losses do not apply")
    return weight


def vocab_start(weight: Tensor, groups: ParallelGroups) -> int:
    """The vocabulary row at which this rank's shard begins."""
    return groups.tp_rank * weight.shape[0]


def read_head(path: Path, model: ModelConfig, groups: ParallelGroups, dtype: torch.dtype) -> Tensor:
    """This rank's shard [Vl, D] of a checkpoint's head, on the device, without the model. No collective.

    The whole head passes through the host's memory.

    Raises:
        CheckpointError: missing, damaged, or of another model.
    """
    place = Place(HEAD if model.untie_embeddings_and_output_weights else EMBEDDING)
    whole = CheckpointWeights(path).megatron(place)[: model.vocab_size]
    return place.shard(whole, model, groups).to(current_device(), dtype)
