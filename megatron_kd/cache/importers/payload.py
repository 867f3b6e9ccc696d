"""Reads one compressed member of a tar without trusting a size that it states.

The member is zstd of what ``torch.save`` wrote: a zip whose records are stored, not compressed. Every size is compared
with the bytes that are there, or with a limit, before memory of that size is asked for.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.zstd import decompress

from megatron_kd.errors import CacheError

MAX_MEMBER_BYTES = 16 * 2**30
"""The largest decompressed member; an iteration of 64 rows of 32,768 positions at K = 100 takes 1 GiB."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Member:
    """A file in a tar: where its bytes are."""

    tar: Path
    name: str
    offset: int
    size: int

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.tar}: {self.name}"

    def read(self) -> bytes:
        """All its bytes. Raises CacheError where the tar has become shorter."""
        with open(self.tar, "rb") as file:
            data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) != self.size:
            raise CacheError(f"{self.where} is truncated: {len(data)} of {self.size} bytes are there; copy it again")
        return data


def members(path: Path) -> Iterator[Member]:
    """The plain files of an uncompressed tar in their order; nothing is unpacked, links are passed over.

    Raises:
        CacheError: for a file that is no tar, is cut off, or states a size that it does not have.
    """
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                # A sparse file may be larger than its tar.
                if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
                    continue
                if info.size < 0 or info.offset_data + info.size > size:
                    raise CacheError(
                        f"{path}: {info.name} shall have {info.size} bytes, which do not fit a file of {size}: "
                        "the tar is cut off or damaged, copy it again"
                    )
                yield Member(path, info.name, info.offset_data, info.size)
            end = tar.offset
        with open(path, "rb") as file:
            mark = os.pread(file.fileno(), tarfile.BLOCKSIZE, end)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CacheError(f"{path} is not a readable tar: {error}; copy it again") from error
    # The library takes a damaged header for the end, as it does the end of a file that was cut between two members.
    if mark != bytes(tarfile.BLOCKSIZE):
        raise CacheError(f"{path} has no end mark behind byte {end}: the tar is cut off or damaged, copy it again")


def zstd_size(data: bytes) -> int | None:
    """The decompressed size that the header of a zstd frame states; None where it states none or is no frame.

    The frame header is that of RFC 8878, section 3.1.1.1.
    """
    if data[:4] != _ZSTD_MAGIC or len(data) < 6:
        return None
    descriptor = data[4]
    single_segment = descriptor >> 5 & 1
    field_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if field_bytes == 0 or len(data) < start + field_bytes:
        return None
    return int.from_bytes(data[start : start + field_bytes], "little") + (256 if field_bytes == 2 else 0)


def decompressed(member: Member, limit: int = MAX_MEMBER_BYTES) -> bytes:
    """The content of a zstd member. Raises CacheError for damage and for more than ``limit`` bytes."""
    data = member.read()
    size = zstd_size(data)
    if size is None:
        raise CacheError(f"{member.where} is damaged: it is no zstd frame of a stated size")
    if size > limit:
        raise CacheError(f"{member.where} would decompress to {size:,} bytes, more than the {limit:,} that it may hold")
    try:
        content = decompress(data)
    except (RuntimeError, ValueError) as error:
        raise CacheError(f"{member.where} is damaged: {error}") from error
    if len(content) != size:
        raise CacheError(f"{member.where} is damaged: {len(content)} bytes instead of {size}")
    return bytes(content)


def load_tensors(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary that ``torch.save`` wrote; only tensors and plain values are let in.

    Raises:
        CacheError: for anything else, and for tensors that claim more elements than the content has bytes.
    """
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED or record.file_size > len(content):
                    raise CacheError(f"{where} is damaged: its record {record.filename!r} is not stored as it is")
            # Neither the frame nor the loader would notice a flipped bit.
            if wrong := archive.testzip():
                raise CacheError(f"{where} is damaged: its record {wrong!r} fails its crc32")
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except CacheError:
        raise
    except Exception as error:  # whatever a damaged pickle makes the loader raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CacheError(f"{where} cannot be loaded as tensors: {first}") from error
    if not isinstance(loaded, dict):
        raise CacheError(f"{where} holds {type(loaded).__name__}, not the tensors of a distillation cache")
    for name, value in loaded.items():
        for tensor in value if isinstance(value, list) else [value]:
            # A stride of 0 makes one byte look like any number of them.
            if isinstance(tensor, torch.Tensor) and tensor.numel() * tensor.element_size() > len(content):
                raise CacheError(
                    f"{where} is damaged: {name} has {tuple(tensor.shape)} elements in {len(content)} bytes"
                )
    return loaded


def as_array(tensor: Any, dtypes: tuple[str, ...], where: str) -> np.ndarray:
    """A dense CPU tensor as an array, bfloat16 as float32. Raises CacheError for another type than the named ones."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if name not in dtypes:
        raise CacheError(f"{where} holds {name} where {' or '.join(dtypes)} belongs")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CacheError(f"{where} holds a tensor that is not dense, or of no device")
    return (tensor.float() if name == "bfloat16" else tensor).detach().numpy()
