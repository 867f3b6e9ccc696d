"""The small files of a Hugging Face folder: its configuration and the index of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_kd.errors import CheckpointError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_LFS_POINTER = b"version https://git-lfs"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping. Raises CheckpointError where it does not, or is missing."""
    try:
        loaded = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}): fetch it again") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} is damaged (not a mapping): fetch it again")
    return loaded


def read_index(index: Path) -> dict[str, str]:
    """Which file of the folder holds each tensor, from ``*.index.json``; all the files are there.

    Raises:
        CheckpointError: the index is damaged, or names a file that is missing or lies outside the folder.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index} has no weight_map: fetch it again")
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is no file of its folder: fetch it again")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent / name} is missing, {index.name} names it: fetch it again")
    return files


def refuse_pointer(file: Path) -> None:
    """Raises CheckpointError where a file of weights is what Git LFS left in its place."""
    with open(file, "rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
