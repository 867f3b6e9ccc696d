"""``megatron-kd plan``: what a recipe will take, before a GPU is booked."""

from __future__ import annotations

from megatron_kd.cli.options import Json, Overrides, RecipeArgument, app
from megatron_kd.console import print_json, quiet_libraries


@app.command()
def plan(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Predict memory, step time, cache size and GPU-hours of a recipe.

    With --json also how many parameters both models have, counted on models built without memory for their weights.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.planning.plan import plan_recipe

    loaded = load_recipe(recipe, overrides or [])
    made = plan_recipe(loaded)
    if json_:
        quiet_libraries()
        from megatron_kd.models.counts import count_alone

        counts = count_alone({"teacher": loaded.teacher.model, "student": loaded.student.model})
        print_json(
            {
                **made.to_dict(),
                "parameters": {role: count.total for role, count in counts.items()},
                "active_parameters": {role: count.active for role, count in counts.items()},
            }
        )
        return
    print(made.to_dict())
