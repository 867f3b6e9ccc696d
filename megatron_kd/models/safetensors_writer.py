"""Writing sharded safetensors one tensor at a time: neither a file nor the model is ever whole in memory.

The format (the safetensors project's README): eight bytes with the length of a JSON header, the header, the tensors'
bytes without gaps. The header is written last, into room that was left for it; it may end in spaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_kd.files import write_json

INDEX = "model.safetensors.index.json"
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ENTRY = 160  # bytes of a tensor's entry in the header beyond its name, at most
_METADATA = {"format": "pt"}  # transformers refuses files without it


class ShardedWriter:
    """A folder's ``model-0000i-of-0000n.safetensors`` with their index, or ``model.safetensors`` where one is enough.

    A context; the files have their names when it ends well.

    Attributes:
        parameters: numbers written.
        bytes_of: bytes written of each dtype.
    """

    def __init__(self, folder: Path, names: Sequence[str], max_shard_bytes: int) -> None:
        """Args: names: all tensors, in the order in which they are going to be added."""
        self.parameters = 0
        self.bytes_of: dict[torch.dtype, int] = {}
        self._folder = folder
        self._left = list(names)
        self._limit = max_shard_bytes
        self._shards: list[tuple[Path, list[str]]] = []
        self._file: BufferedWriter | None = None
        self._header: dict[str, Any] = {}
        self._room = self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            return
        self._close_shard()
        assert not self._left, f"{len(self._left)} tensors were announced and not added"
        self._name_shards()

    def add(self, name: str, pieces: Iterator[Tensor], count: int | None = None) -> None:
        """Adds the next of the announced tensors.

        Args:
            pieces: the tensor; or with ``count`` that many slices along its first dimension, alike in shape and dtype.

        Raises:
            ValueError: a piece unlike the first, or another number of them.
        """
        assert name == self._left[0], f"{name} is not the next tensor, {self._left[0]} is"
        first = next(pieces)
        size = first.nbytes * (1 if count is None else count)
        # Readers map a tensor in place, which needs it at a multiple of its element size.
        fits = self._end + size <= self._limit and self._end % first.itemsize == 0
        if self._file is None or (self._end and not fits):
            self._open_shard()
        assert self._file is not None
        self._write(first)
        written = 1
        for piece in pieces:
            if piece.shape != first.shape or piece.dtype != first.dtype:
                raise ValueError(f"{name}: a slice is {piece.dtype} {list(piece.shape)}, the first {list(first.shape)}")
            self._write(piece)
            written += 1
        if written != (1 if count is None else count):
            raise ValueError(f"{name}: {written} slices, not {count}")
        shape = list(first.shape) if count is None else [count, *first.shape]
        offsets = [self._end, self._end + size]
        self._header[name] = {"dtype": _KINDS[first.dtype], "shape": shape, "data_offsets": offsets}
        self._end += size
        self._left.pop(0)
        self.parameters += size // first.itemsize
        self.bytes_of[first.dtype] = self.bytes_of.get(first.dtype, 0) + size

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return sum(self.bytes_of.values())

    def files(self) -> list[str]:
        """The names of the shards, in order."""
        return [path.name for path, _ in self._shards]

    def _write(self, piece: Tensor) -> None:
        assert self._file is not None
        self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _open_shard(self) -> None:
        self._close_shard()
        room = sum(len(json.dumps(name)) + _ENTRY for name in self._left) + _ENTRY
        self._room = -(-room // 8) * 8
        path = self._folder / f".{len(self._shards)}.safetensors"
        self._shards.append((path, []))
        self._file = open(path, "xb")  # noqa: SIM115 - it stays open from one tensor to the next
        self._file.seek(8 + self._room)

    def _close_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": _METADATA, **self._header}, separators=(",", ":")).encode()
        assert len(header) <= self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._shards[-1][1].extend(self._header)
        self._file, self._header, self._end = None, {}, 0

    def _name_shards(self) -> None:
        number = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{number:05}.safetensors" if number > 1 else "model.safetensors"
            self._shards[i] = path.rename(self._folder / file), names
            weight_map |= dict.fromkeys(names, file)
        if number > 1:
            total = {"total_parameters": self.parameters, "total_size": self.total_bytes}
            write_json(self._folder / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
