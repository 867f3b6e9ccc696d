"""What the commands share: the groups they belong to and the arguments that recur."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="megatron-kd",
    help="Distil large language models on Megatron-Core: capture a teacher once, train students against the cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Convert Hugging Face weights.", no_args_is_help=True, rich_markup_mode=None)
cache_app = typer.Typer(
    help="Look into, check, compare and import teacher caches.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(convert_app, name="convert")
app.add_typer(cache_app, name="cache")
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, see recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override keys of the recipe: optimizer.lr=1e-5")
]
Best = Annotated[
    bool, typer.Option("--best", help="Of a run, the checkpoint with the lowest eval/kd instead of the newest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON alone on standard output.")]


def refuse_wrong_world(recipe: Any) -> None:
    """Before torch is imported: a run started on the wrong number of ranks is refused at once."""
    from megatron_kd.config.world import check_world_size

    check_world_size(recipe, sys.argv[1:])
