"""Run within the build of an image: everything imports, and torch is still the one that the image came with.

python import_check.py VERSION_OF_TORCH
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import torch

import megatron_kd

NEED_A_GPU_OR_EXTRAS = ("megatron_kd.losses.triton", "megatron_kd.teacher.vllm")


def modules() -> list[str]:
    """The names of all modules that an image must be able to import."""
    names = [module.name for module in pkgutil.walk_packages(megatron_kd.__path__, "megatron_kd.")]
    return [name for name in names if not name.startswith(NEED_A_GPU_OR_EXTRAS) and not name.endswith("__main__")]


def main(expected: str) -> None:
    """Raises ImportError or SystemExit where something is missing."""
    if torch.__version__ != expected:
        sys.exit(f"import_check: torch is {torch.__version__}, it was {expected}: something has installed another one")
    for name in modules():
        importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1])
