"""Hugging Face weights into a Megatron-Core model, one tensor at a time, each rank its shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError, KDError
from megatron_kd.models.families import EMBEDDING, HEAD, Entry
from megatron_kd.models.hf_config import check_architecture
from megatron_kd.models.hf_source import HFWeights, StoredWeights
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.parameters import Place, places, places_in
from megatron_kd.progress import progress


def load_hf_weights(
    built: torch.nn.Module,
    model: ModelConfig,
    weights: HFWeights,
    groups: ParallelGroups,
    *,
    dtypes: Mapping[Entry, torch.dtype] | None = None,
    show: bool = False,
) -> None:
    """Fills this rank's shard of a model. No collective; every rank reads what it needs, one tensor at a time.

    Args:
        dtypes: makes the parameters of each entry of that dtype (``stored_dtypes``); None: they keep their own.

    Raises:
        CheckpointError: another architecture, a missing tensor, one too many, or a shape that does not fit.
    """
    check_architecture(model, weights.config())
    check_names(model, weights)
    _check_repeated_head(model, weights)
    todo = list(places_in(built, model, groups))
    with progress("importing weights", len(todo), unit="tensors", enabled=show) as advance, torch.no_grad():
        for place, parameter in todo:
            local = _local(parameter, place, model, weights, groups)
            if dtypes is not None and dtypes[place.entry] != parameter.dtype:
                parameter.data = torch.empty_like(parameter, dtype=dtypes[place.entry])
            parameter.copy_(local)
            advance(1)


def _local(
    parameter: torch.nn.Parameter, place: Place, model: ModelConfig, weights: HFWeights, groups: ParallelGroups
) -> torch.Tensor:
    sources = ", ".join(place.hf_names)
    try:
        whole = place.whole(weights.read, model)
        local = place.shard(whole, model, groups)
    except KDError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{weights.path}: {sources} do not fit the model {model.name!r}: {error}") from error
    if local.shape != parameter.shape:
        raise CheckpointError(
            f"{weights.path}: {sources} make {place.megatron_name} of shape {tuple(local.shape)} on this rank, "
            f"the model {model.name!r} needs {tuple(parameter.shape)}"
        )
    return local


def stored_dtypes(model: ModelConfig, weights: StoredWeights) -> dict[Entry, torch.dtype]:
    """The narrowest dtype of each entry that holds all of its tensors as they are stored. Reads no tensor.

    One for all layers and experts, which a distributed checkpoint stacks.

    Raises:
        CheckpointError: a tensor is missing, or holds no floating-point numbers.
    """
    check_names(model, weights)
    found: dict[Entry, torch.dtype] = {}
    for place in places(model):
        for name in place.hf_names:
            stored = weights.dtype(name)
            if not stored.is_floating_point:
                raise CheckpointError(
                    f"{weights.path}: {name} is stored in {stored}, not in floating point: it is quantised in a way "
                    "that this version cannot read"
                )
            found[place.entry] = torch.promote_types(found.get(place.entry, stored), stored)
    return found


def _check_repeated_head(model: ModelConfig, weights: HFWeights) -> None:
    """Some files repeat the embedding as the head of a tied model; another matrix there is a model that is not tied."""
    (head,), (embedding,) = HEAD.hf, EMBEDDING.hf
    if model.untie_embeddings_and_output_weights or head not in weights.names():
        return
    if not torch.equal(weights.read(head), weights.read(embedding)):
        raise CheckpointError(
            f"{weights.path} has {head!r} beside {embedding!r} with other values, but the model {model.name!r} is "
            "tied: set untie_embeddings_and_output_weights to true"
        )


def check_names(model: ModelConfig, weights: HFWeights) -> None:
    """Every tensor that the model needs is there, and none beyond.

    A tensor that no entry reads, a bias or a norm, belongs to a function that the built model does not compute.

    Raises:
        CheckpointError: naming the first tensor too few or too many.
    """
    needed = {name for place in places(model) for name in place.hf_names}
    there = set(weights.names())
    missing = sorted(needed - there)
    if missing:
        raise CheckpointError(
            f"{weights.path} has no tensor {missing[0]!r}, which the model {model.name!r} needs "
            f"({len(missing)} such tensors): its architecture is not the recipe's"
        )
    # Some files repeat the embedding as the head of a tied model.
    left = [name for name in there - needed if name not in HEAD.hf and not name.endswith("rotary_emb.inv_freq")]
    if left:
        raise CheckpointError(
            f"{weights.path} has {min(left)!r}, which the model {model.name!r} has no place for "
            f"({len(left)} such tensors): it is of another architecture"
        )
