"""Single tensors out of a ``torch_dist`` checkpoint, in one process, without collectives and without a model."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint import read_note
from megatron_kd.models.checkpoint_files import check_files, one_line
from megatron_kd.models.families import Entry
from megatron_kd.models.parameters import Place
from megatron_kd.models.table_weights import TableWeights


class CheckpointTensors:
    """Random access to the tensors of a checkpoint. Only the saved pieces that overlap what is asked for are read.

    Megatron-Core stacks the parameters of all layers under one key, and of all experts within them: a piece is (part
    of) one layer's, one expert's tensor.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the checkpoint has no readable metadata or a file of it is missing or short."""
        check_files(path, read_note(path).get("files", {}))
        self.path = path
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def names(self) -> list[str]:
        """The keys of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """The whole shape of a tensor, stacked dimensions first. Raises CheckpointError for an unknown key."""
        return tuple(self._stored(key).size)

    def read(self, key: str, *index: int) -> Tensor:
        """A tensor, or what lies at ``index`` of its first dimensions, on the CPU in the dtype it was saved in.

        Raises:
            CheckpointError: no such key, or a piece of it is missing or damaged.
            IndexError: it has no such index.
        """
        stored = self._stored(key)
        shape = tuple(stored.size)
        if len(index) > len(shape) or any(not 0 <= i < size for i, size in zip(index, shape, strict=False)):
            raise IndexError(f"{key} of shape {shape} in {self.path} has no index {index}")
        inner = shape[len(index) :]
        wanted = ChunkStorageMetadata(
            offsets=torch.Size((*index, *(0 for _ in inner))), sizes=torch.Size((*(1 for _ in index), *inner))
        )
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        there, needed = sum(math.prod(item.lengths) for item in items), math.prod(wanted.sizes)
        if there != needed:
            raise CheckpointError(f"{self.path} is damaged: {key} at {index} has {there} values of {needed}")
        into = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _IntoOneTensor(into)).wait()
        except Exception as error:  # a damaged file can make anything of torch's reader
            raise CheckpointError(f"{self.path} is damaged: {key} cannot be read ({one_line(error)})") from error
        return into.view(inner)

    def _stored(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {key!r}: it holds another architecture")
        return self._tensors[key]


class _IntoOneTensor(LoadPlanner):
    """Tells torch's reader to put each piece at its place in one tensor. The plan is made outside of it."""

    def __init__(self, into: Tensor) -> None:
        self._into = into

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._into
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what ``resolve_tensor`` gave is a view."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("only tensors are asked for")

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        raise NotImplementedError("the plan is made by CheckpointTensors")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by CheckpointTensors")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made by CheckpointTensors")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made by CheckpointTensors")


def checkpoint_key(entry: Entry) -> str:
    """The key under which Megatron-Core saves the parameters of an entry, those of all layers and experts together.

    Both specifications save under the same keys: norms under the names of Transformer Engine, which fuses them into
    the next linear layer, experts under names of their own.
    """
    name = entry.megatron if entry.te is None or entry.is_expert else entry.te
    return name.replace("layers.{i}.", "layers.").replace("local_experts.{e}.", "experts.")


class CheckpointWeights(TableWeights):
    """The weights in a checkpoint, of weights alone or of a training run, as ``HFWeights``: bit by bit what went in."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where there is no checkpoint, or one of an architecture this version does not know."""
        self.note = read_note(path)
        try:
            model = ModelConfig.model_validate(self.note["architecture"])
        except ValidationError as error:
            raise CheckpointError(
                f"{path} holds an architecture that this version cannot read ({error.errors()[0]['msg']}): "
                "use the version that wrote it"
            ) from error
        super().__init__(path, model)
        self._tensors = CheckpointTensors(path)

    def megatron(self, place: Place) -> Tensor:
        """One layer's, one expert's tensor; the others are not read."""
        index = [i for i in (place.layer, place.expert) if i is not None]
        try:
            return self._tensors.read(checkpoint_key(place.entry), *index)
        except IndexError as error:
            raise CheckpointError(f"{self.path} is damaged or of another model: {error}") from error
