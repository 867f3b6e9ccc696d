"""Which entry of its family's table each parameter of a built model is, with its global layer and expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.chunks import chunks_of
from megatron_kd.models.families import EMBEDDING, HEAD, Entry, table
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.vocabulary import padded_vocab_size

Read = Callable[[str, int | None], Tensor]
"""Reads one Hugging Face tensor by its name, or one index of its first dimension."""


@dataclass(frozen=True)
class Place:
    """One Megatron parameter of the whole model.

    Attributes:
        layer, expert: counted over all stages and ranks; None where the entry has none.
    """

    entry: Entry
    layer: int | None = None
    expert: int | None = None

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors it is made of."""
        return tuple(self._filled(name) for name in self.entry.hf)

    @property
    def megatron_name(self) -> str:
        """Its name in a model on one rank."""
        return self._filled(self.entry.megatron)

    def _filled(self, template: str) -> str:
        return template.format(i=self.layer, e=self.expert)

    def whole(self, read: Read, model: ModelConfig) -> Tensor:
        """The whole Megatron tensor, made of Hugging Face's; see ``Layout.to_megatron`` for leading dimensions.

        Raises:
            ValueError, RuntimeError: the tensors do not have the shapes of the model.
        """
        index = self.expert if self.entry.stacked else None
        return self.entry.layout.to_megatron([read(name, index) for name in self.hf_names], model)

    def shard(self, whole: Tensor, model: ModelConfig, groups: ParallelGroups) -> Tensor:
        """This rank's part, in the parameter's own shape; the vocabulary is padded with zero rows.

        Raises:
            ValueError: tensor parallelism does not divide it.
        """
        if self.entry in (EMBEDDING, HEAD):
            rows = padded_vocab_size(model.vocab_size, groups.tp_size) - whole.shape[0]
            whole = torch.cat((whole, whole.new_zeros(rows, *whole.shape[1:])))
        if self.entry.tp_dim is not None:
            rank, size = (
                (groups.etp_rank, groups.etp_size) if self.entry.is_expert else (groups.tp_rank, groups.tp_size)
            )
            width = whole.shape[self.entry.tp_dim]
            if width % size:
                raise ValueError(f"{size} ranks do not divide its {width} rows or columns evenly")
            whole = whole.narrow(self.entry.tp_dim, rank * (width // size), width // size)
        return whole.flatten(0, 1) if self.entry.layout.paired else whole


def places(model: ModelConfig) -> Iterator[Place]:
    """Every parameter of the whole model, in Megatron's order."""
    entries = table(model)
    of_layers = [entry for entry in entries if entry.is_of_layer]
    yield Place(entries[0])
    for layer in range(model.num_layers):
        for entry in of_layers:
            for expert in range(model.num_moe_experts or 0) if entry.is_expert else (None,):
                yield Place(entry, layer, expert)
    for entry in entries[1:]:
        if not entry.is_of_layer:
            yield Place(entry)


def places_in(
    built: torch.nn.Module, model: ModelConfig, groups: ParallelGroups
) -> Iterator[tuple[Place, torch.nn.Parameter]]:
    """The parameters of this rank's part of a model, each with its place in the whole.

    A tied embedding on the last of several stages is the embedding, a second time.

    Raises:
        CheckpointError: the model has a parameter that its family's table does not know.
    """
    entries = {pattern: entry for entry in table(model) for pattern in _patterns(entry)}
    experts = (model.num_moe_experts or 0) // groups.ep_size
    for layers, name, parameter in _named_parameters(built):
        if name == HEAD.megatron and not model.untie_embeddings_and_output_weights:
            yield Place(EMBEDDING), parameter
            continue
        for pattern, entry in entries.items():
            match = pattern.fullmatch(name)
            if match is not None:
                found = match.groupdict()
                layer = layers[int(found["i"])] if "i" in found else None
                expert = groups.ep_rank * experts + int(found["e"]) if "e" in found else None
                yield Place(entry, layer, expert), parameter
                break
        else:
            raise CheckpointError(f"the table of family {model.family} knows no parameter {name!r} of the built model")


def _named_parameters(built: torch.nn.Module) -> Iterator[tuple[list[int], str, torch.nn.Parameter]]:
    """The parameters of all chunks by their names in their chunk, each with its chunk's layers in the whole model."""
    for chunk in chunks_of(built):
        # Megatron-Core numbers the layers of all stages from 1.
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            yield layers, name, parameter


@cache
def _patterns(entry: Entry) -> tuple[re.Pattern[str], ...]:
    names = (entry.megatron,) if entry.te is None else (entry.megatron, entry.te)
    return tuple(
        re.compile(re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+)")) for name in names
    )
