"""``megatron-kd plan``: what a recipe will take, before a GPU is booked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_kd.cli.options import Json, Overrides, app
from megatron_kd.console import print_json, quiet_libraries, writing_to


@app.command()
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, see recipes/.")
    ] = None,
    overrides: Overrides = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Search the layouts: the fastest that fit on the fewest nodes.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the memory of each loss implementation beside the limit."),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Instead of a recipe: predictions beside published results.")
    ] = False,
    json_: Json = False,
) -> None:
    """Predict memory, step time, cache size and GPU-hours of a recipe.

    Arithmetic alone: no GPU, no weights, no data. With --json also how many parameters both models have, counted on
    models built without memory for their weights.
    """
    from megatron_kd.errors import ConfigError

    if published:
        if recipe is not None:
            raise ConfigError("--published takes no recipe: leave one of them out")
        _published(json_)
        return
    if recipe is None:
        raise ConfigError("plan needs a recipe, or --published: name a YAML file, see recipes/")
    from megatron_kd.config import load_recipe
    from megatron_kd.planning.plan import plan_recipe
    from megatron_kd.planning.suggest import suggest as search
    from megatron_kd.planning.text import SHOWN, describe, describe_suggestions

    loaded = load_recipe(recipe, overrides or [])
    made = plan_recipe(loaded)
    found = search(loaded) if suggest else []
    if figure is not None:
        _draw(loaded, figure)
    if json_:
        print_json(
            {
                **made.to_dict(),
                **_counted(loaded),
                "suggestions": [suggestion.to_dict() for suggestion in found[:SHOWN]],
            }
        )
        return
    print(describe(made))
    if suggest:
        print(f"\n{describe_suggestions(found)}")
    if figure is not None:
        print(f"\npicture: {figure}")


def _counted(recipe: Any) -> dict[str, Any]:
    quiet_libraries()
    from megatron_kd.models.counts import count_alone

    counts = count_alone({"teacher": recipe.teacher.model, "student": recipe.student.model})
    return {
        "parameters": {role: count.total for role, count in counts.items()},
        "active_parameters": {role: count.active for role, count in counts.items()},
    }


def _draw(recipe: Any, path: Path) -> None:
    from megatron_kd.files import write_atomic
    from megatron_kd.planning.figure import draw_memory, implementations

    with writing_to(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, draw_memory(implementations(recipe)))


def _published(as_json: bool) -> None:
    from megatron_kd.planning.published import published_markdown, published_rows

    if as_json:
        print_json(published_rows())
    else:
        print(published_markdown())
