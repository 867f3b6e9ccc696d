"""One string out of a GGUF header, without the rest of it.

The reader of the gguf package takes seconds, since it builds an array object for each of 100,000 vocabulary entries.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO

from megatron_kd.errors import DataError

_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_string(path: Path, key: str) -> str | None:
    """The value of a string key, None where the header has no such key.

    Raises DataError for a file that is not little-endian GGUF of version 2 or 3, or is damaged.
    """
    with open(path, "rb") as file:
        try:
            return _find(file, key.encode())
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is no GGUF file of version 2 or 3, or a damaged one") from error


def _find(file: IO[bytes], wanted: bytes) -> str | None:
    magic, version, _tensors, entries = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise KeyError("magic or version")
    for _ in range(entries):
        key = _read_string(file)
        kind = _read_int(file, "<I")
        if key == wanted and kind == _STRING:
            return _read_string(file).decode()
        _skip(file, kind)
    return None


def _skip(file: IO[bytes], kind: int) -> None:
    if kind == _STRING:
        file.seek(_read_int(file, "<Q"), os.SEEK_CUR)
    elif kind == _ARRAY:
        element, count = struct.unpack("<IQ", file.read(12))
        if element in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[element] * count, os.SEEK_CUR)
        else:
            for _ in range(count):
                _skip(file, element)
    else:
        file.seek(_SCALAR_BYTES[kind], os.SEEK_CUR)


def _read_int(file: IO[bytes], layout: str) -> int:
    return int(struct.unpack(layout, file.read(struct.calcsize(layout)))[0])


def _read_string(file: IO[bytes]) -> bytes:
    length = _read_int(file, "<Q")
    data = file.read(length) if length < 2**32 else b""
    if len(data) != length:
        raise KeyError("string behind the end of the file")
    return data
