"""The ``megatron-kd`` command: parses, calls one function, prints. Heavy imports happen inside the commands."""

from megatron_kd.cli import bench, cache, compare, doctor, evaluate, plan, sweep  # noqa: F401  they register commands
from megatron_kd.cli.commands import app, main

__all__ = ["app", "main"]
