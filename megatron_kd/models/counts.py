"""How many parameters a model has: those that Megatron-Core builds, on the meta device, which holds no numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import ModelConfig, ParallelismConfig
from megatron_kd.device import init_distributed, select_device
from megatron_kd.models.build import build_on_meta
from megatron_kd.models.parallel import ParallelGroups, init_model_parallel
from megatron_kd.models.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model without the padding of its vocabulary.

    Attributes:
        total: all of them, a tied embedding once.
        active: those that one token passes through: of the experts only the chosen ones.
    """

    total: int
    active: int


def count_parameters(model: ModelConfig, groups: ParallelGroups) -> ParameterCount:
    """Counts the model that is built for the architecture on one rank.

    One layer and two are built, whatever the depth: all layers have the same parameters.

    Args:
        groups: of one rank.
    """
    one, two = (_built(model.cut(range(layers)), groups) for layers in (1, 2))
    deep = model.num_layers - 1
    total = one[0] + deep * (two[0] - one[0])
    experts = one[1] + deep * (two[1] - one[1])
    idle = 0
    if model.num_moe_experts is not None and model.moe_router_topk is not None:
        idle = experts // model.num_moe_experts * (model.num_moe_experts - model.moe_router_topk)
    return ParameterCount(total, total - idle)


def count_alone(models: dict[str, ModelConfig]) -> dict[str, ParameterCount]:
    """``count_parameters`` of several models in a process that belongs to no job: on the CPU, one rank."""
    select_device("cpu")
    init_distributed()
    groups = init_model_parallel(ParallelismConfig(), seed=0)
    return {role: count_parameters(model, groups) for role, model in models.items()}


def padding_parameters(model: ModelConfig) -> int:
    """Parameters in the rows that one rank adds to the vocabulary; they are nobody's weights."""
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    return (padded_vocab_size(model.vocab_size, 1) - model.vocab_size) * model.hidden_size * matrices


def _built(model: ModelConfig, groups: ParallelGroups) -> tuple[int, int]:
    """All parameters, and those of experts."""
    sizes = {name: parameter.numel() for name, parameter in build_on_meta(model, groups).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    return sum(sizes.values()) - padding_parameters(model), experts
