"""How much of the routers' probability each expert of a model gets on some rows: which experts are worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.device import current_device
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.schedule import run_schedule


@torch.no_grad()
def router_mass(
    built: GPTModel, model: ModelConfig, groups: ParallelGroups, rows: Tensor, documents: Tensor | None = None
) -> Tensor:
    """The routing probabilities of all tokens, summed per layer and expert. Collective over all ranks.

    Of each token the experts it is sent to get the weights that their outputs are mixed with, the others 0; over the
    experts of a layer they add up to 1.

    Args:
        built: a model with experts, in evaluation mode, of any layout.
        rows: int64 [n, s], n ≥ 1, the same on all ranks; each data-parallel rank runs its share.
        documents: integers [n, s], where a token sees its own document alone.

    Returns:
        float64 [layers, experts], on the CPU, the same on all ranks.
    """
    mass = torch.zeros(model.num_layers, model.num_moe_experts or 0, dtype=torch.float64)
    # Every rank takes part in each forward pass, since experts lie on others' ranks: one without a row runs another's.
    rounds = -(-len(rows) // groups.dp_size)
    mine = [turn * groups.dp_size + groups.dp_rank for turn in range(rounds)]
    # Tensor-parallel ranks see slices of the tokens under sequence parallelism, else all the same.
    counts = groups.sequence_parallel or groups.is_first_tp_rank
    counting = False
    at = groups.context.positions(rows.shape[1])

    def add(layer: int, probabilities: Tensor) -> None:
        if counting:
            mass[layer] += probabilities.double().sum(dim=0).cpu()

    def forward(module: torch.nn.Module, row: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
        nonlocal counting
        counting = counts and row < len(rows)
        at_row = row % len(rows)
        tokens = rows[at_row, at][None].to(current_device())
        within = None if documents is None else documents[at_row][None].to(current_device())
        places = groups.context.places(tokens, within)
        return module(tokens, places, within, output_processor=_no_logits), _no_loss

    with _hooked(built, add):
        run_schedule(
            built,
            groups,
            mine,
            forward,
            number=len(mine),
            seq_length=rows.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    total = mass.to(current_device())
    dist.all_reduce(total)
    return total.cpu()


@contextmanager
def _hooked(built: GPTModel, add: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While entered, ``add`` hears each router's layer (over all stages) and its probabilities [tokens, experts]."""

    def hook(layer: int) -> Callable[[torch.nn.Module, Any, tuple[Tensor, Tensor]], None]:
        return lambda _module, _inputs, output: add(layer, output[0])

    # Megatron-Core numbers the layers of all stages from 1.
    handles = [layer.mlp.router.register_forward_hook(hook(layer.layer_number - 1)) for layer in built.decoder.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _no_logits(*, hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states.sum()


def _no_loss(output: Tensor) -> tuple[Tensor, Tensor, None]:
    return output, torch.ones((), dtype=torch.int, device=output.device), None
