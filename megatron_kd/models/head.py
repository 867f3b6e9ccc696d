"""The output projection as an ``output_processor`` sees it. Vl rows of the head on this rank, D hidden."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_kd.models.parallel import ParallelGroups


def head_of(output_layer: Any, output_weight: Tensor | None) -> Tensor:
    """This rank's shard [Vl, D] of the head: the tied embedding where it is handed over, else the layer's own."""
    weight: Tensor = output_weight if output_weight is not None else output_layer.weight
    if getattr(output_layer, "bias", None) is not None:
        raise ValueError("the output layer has a bias, which the losses do not apply")
    return weight


def vocab_start(weight: Tensor, groups: ParallelGroups) -> int:
    """The vocabulary row at which this rank's shard begins."""
    return groups.tp_rank * weight.shape[0]
