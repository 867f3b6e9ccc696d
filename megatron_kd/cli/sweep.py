"""``megatron-kd sweep``: a grid of runs, one table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_kd.cli.options import Json, Overrides, app
from megatron_kd.console import print_json, say_error, writing_to


@app.command()
def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="SWEEP", help="A sweep: a YAML file with base, and grid or runs; recipes/ablations."),
    ],
    overrides: Overrides = None,
    base: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Vary this recipe instead of the file's own base.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="POINT", help="Run this point; can be repeated.")] = None,
    index: Annotated[int | None, typer.Option(metavar="I", help="Run the I-th point alone, counted from 1.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the points and what is to be made for them.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="The same with planned memory, step time and hours.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only make what the points read: checkpoints, samples, caches.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Run nothing: print the table of what is there.")] = False,
    write: Annotated[
        str | None,
        typer.Option(
            metavar="points|inputs",
            help="Run nothing: write the recipes of the points, or those that make what they read, and print their "
            "paths, for scripts.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Train a grid of recipes and show them in one table.

    All recipes are checked before the first run. What the points read is made once for those that share it, each cache
    with the largest top_k and every temperature. A point that fails does not end the sweep: the status is then 1.
    Started again, it does what is not finished. SIGTERM, SIGUSR1 and Ctrl-C have the running point save, and end it.
    """
    from megatron_kd.config.sweep import load_sweep
    from megatron_kd.errors import ConfigError, LaunchError
    from megatron_kd.sweep.run import run_sweep, write_recipes

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError("sweep starts the ranks of each point itself: start it alone, without torchrun or srun")
    modes = {"--dry-run": dry_run, "--plan": plan, "--prepare": prepare, "--table": table, "--write": write is not None}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are given: choose one of them")
    if write not in (None, "points", "inputs"):
        raise ConfigError(f"--write is {write!r}, must be points or inputs")
    loaded = load_sweep(file, overrides or [], base=base)
    points = _chosen(loaded, only or [], index)
    if write is not None:
        with writing_to(str(loaded.run_dir)):
            paths = [str(path) for path in write_recipes(loaded, write)]
        print("\n".join(paths) if not json_ else _json_text(paths))
        return
    if dry_run or plan:
        _list(loaded, points, plan, json_)
        return
    if table:
        _print_table(loaded, json_)
        return
    with writing_to(str(loaded.run_dir)):
        outcome = run_sweep(loaded, points, only_inputs=prepare)
    if outcome.stopped is not None:
        typer.echo(f"sweep: stopped by {outcome.stopped}, start it again to go on", err=True)
        return
    if not prepare:
        _print_table(loaded, json_)
    if outcome.failed:
        which = ", ".join(f"{name} ({why})" for name, why in outcome.failed.items())
        say_error(
            f"{len(outcome.failed)} of {len(points)} points did not finish: {which}; what they said stands above, "
            "and the sweep started again tries them again"
        )
        raise typer.Exit(1)


def _chosen(loaded: Any, only: list[str], index: int | None) -> list[Any]:
    import difflib

    from megatron_kd.errors import ConfigError

    known = {point.name: point for point in loaded.points}
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"--only {name}: the sweep has no such point: did you mean {near}?")
    if index is not None:
        if only:
            raise ConfigError("--only and --index are given: choose one of them")
        if not 1 <= index <= len(loaded.points):
            raise ConfigError(f"--index is {index}, the sweep has the points 1 to {len(loaded.points)}")
        return [loaded.points[index - 1]]
    return [point for point in loaded.points if not only or point.name in only]


def _list(loaded: Any, points: list[Any], plan: bool, as_json: bool) -> None:

    from megatron_kd.planning.plan import plan_recipe
    from megatron_kd.sweep.inputs import inputs_of
    from megatron_kd.sweep.run import some
    from megatron_kd.sweep.table import points_json, points_table

    plans = [plan_recipe(point.recipe) for point in points] if plan else None
    names = {point.name for point in points}
    inputs = [each for each in inputs_of(loaded) if names.intersection(each.points)]
    if as_json:
        made = [
            {"points": each.points, "commands": [" ".join(command) for command in each.missing()]} for each in inputs
        ]
        print_json({"sweep": loaded.name, "points": points_json(points, plans), "inputs": made})
        return
    console = _console()
    console.print(points_table(loaded, points, plans))
    for each in inputs:
        if commands := [" ".join(command) for command in each.missing()]:
            console.print(f"first, for {some(each.points)}: {', '.join(commands)}", highlight=False, soft_wrap=True)


def _print_table(loaded: Any, as_json: bool) -> None:
    from megatron_kd.sweep.table import sweep_table

    with writing_to(str(loaded.run_dir)):
        found = sweep_table(loaded)
    if as_json:
        print_json(found.to_json())
    else:
        _console().print(found.render())


def _console() -> Any:
    """As wide as the terminal; a file has no width of its own."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def _json_text(value: Any) -> str:
    import json

    return json.dumps(value, indent=2)
