"""``megatron-kd doctor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_kd.cli.options import Json, Overrides, app
from megatron_kd.console import is_first_rank, leave, print_figures, quiet_libraries, say_error


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also check what this recipe needs and reads.")
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure no disk and no link, and leave the self-test of the losses out.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for another rank.")] = 60.0,
    json_: Json = False,
) -> None:
    """Check this environment, and what a recipe needs.

    Versions, GPUs, disks, limits, tokenizer, samples, cache and checkpoints, and the losses against a dense one in
    float64. Under torchrun or srun every node is checked, the links between the ranks, and the losses over them.
    Exits with status 1 where anything failed. docs/doctor.md has all findings and what to do.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import RemoteRankError

    loaded = None if recipe is None else load_recipe(recipe, overrides or [])
    quiet_libraries()
    # Where a store is not reached torch prints a page of its own stack above our line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron_kd.doctor.job import Patient, examine
    from megatron_kd.doctor.launcher import adopt_slurm_ranks

    adopt_slurm_ranks(os.environ)
    arguments = [] if recipe is None else [str(recipe), *(overrides or [])]
    patient = Patient(loaded, arguments, timeout, quick)
    try:
        well = examine(patient, lambda report: print_figures(report.to_json(), json_, report.text()))
    except RemoteRankError as error:
        say_error(error)
        leave(1)
    # One rank speaks for all: torchrun has a page of its own to say about each that leaves with another status.
    if not well and is_first_rank():
        leave(1)  # without waiting for a rank that hangs in a collective
