"""Writes requirements.txt beside this file: what the images install, all of it pinned as in constraints.txt.

That is the closure of pyproject's dependencies as installed here, without torch, all that torch needs itself, NumPy and
Megatron-Core: the image of NVIDIA has its own builds of the first three, and Megatron-Core gets a layer of its own.
Run it where `make setup` has run, whenever pyproject.toml or constraints.txt changes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("object-store",)
OF_THE_IMAGE = ("torch", "numpy", "megatron-core", "setuptools")


def normal(name: str) -> str:
    """A distribution's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: Iterable[str], without: frozenset[str] = frozenset()) -> set[str]:
    """The distributions and all that they need here, by the metadata of what is installed."""
    found: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in without:
            continue
        found.add(name)
        for text in metadata.distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(normal(needed.name))
    return found


def pins() -> dict[str, str]:
    """constraints.txt, by normal name."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def direct() -> set[str]:
    """The dependencies that pyproject names, with those of ``EXTRAS``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    return {normal(Requirement(text).name) for text in (*project["dependencies"], *extras)}


def torch_and_its_kin() -> frozenset[str]:
    """What the images have from elsewhere, and NVIDIA's wheels, which come with torch on a CPU machine too."""
    kin = closure(OF_THE_IMAGE[:1]) | set(OF_THE_IMAGE)
    return frozenset(kin | {name for name in pins() if name.startswith(("nvidia-", "cuda-"))})


def requirements() -> str:
    """The file's text."""
    pinned = pins()
    names = sorted(closure(direct() - torch_and_its_kin(), torch_and_its_kin()))
    head = "# Made by docker/make_requirements.py; installed with --no-deps.\n"
    return head + "".join(f"{name}=={pinned[name]}\n" for name in names)


if __name__ == "__main__":
    (Path(__file__).with_name("requirements.txt")).write_text(requirements())
