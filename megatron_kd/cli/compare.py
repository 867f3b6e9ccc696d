"""``megatron-kd compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_kd.cli.options import Json, app
from megatron_kd.console import print_json, writing_to
from megatron_kd.errors import KDError


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="A run directory, a folder that wandb wrote (runs/x/wandb/offline-run-…, or one that holds several), "
            "or a run on a wandb server: wandb://entity/project/run_id, or its address in a browser.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the picture and the page.")] = Path("runs/compare"),
    kl: Annotated[
        float | None,
        typer.Option(help="Count GPU-hours to this divergence; by default to the highest of the runs' final ones."),
    ] = None,
    wandb_report: Annotated[
        bool, typer.Option("--wandb-report", help="Also make a report of the runs' project on the wandb server.")
    ] = False,
    json_: Json = False,
) -> None:
    """Compare runs in a table, a picture and a page.

    Divergence over tokens and over GPU-hours, step time, TFLOP/s and memory of each run, what it cost to reach a given
    divergence, and the settings in which the recipes differ. compare.html is one file that opens from a disk.
    """
    from megatron_kd.report import compare as run

    with writing_to(str(out)):
        found = run(runs, out, kl)
    address, refused = None, None
    if wandb_report:
        from megatron_kd.report.wandb_report import publish_report

        try:
            address = publish_report(found)
        except KDError as error:
            refused = KDError(f"{error} (written: {found.page} and {found.figure})")
    if json_:
        print_json({**found.to_json(), "wandb_report": address})
    else:
        from rich.console import Console

        console = Console()
        console.print(found.table())
        console.print(f"picture: {found.figure}", highlight=False, soft_wrap=True)
        console.print(f"page:    {found.page}", highlight=False, soft_wrap=True)
        if address is not None:
            console.print(f"report:  {address}", highlight=False, soft_wrap=True)
    if refused is not None:
        raise refused
