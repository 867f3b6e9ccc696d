"""Samples, teacher and targets for benchmarks where there are none, made of a recipe's corpus in a temporary folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_kd.bench.cache_rows import COUNTED_POSITIONS
from megatron_kd.config import Recipe, load_recipe
from megatron_kd.errors import ConfigError

DEMO_RECIPE = Path("recipes/smollm2_cpu.yaml")
ROW_LENGTH = 2048


def find_demo_recipe(instead: str = "a recipe, or an existing cache with --cache") -> Path:
    """The demo's recipe, here or in the repository that this package is run from.

    Args:
        instead: what can be given where there is none, for the message.

    Raises:
        ConfigError: in neither, as where the package alone is installed.
    """
    for root in (Path(), Path(__file__).resolve().parents[2]):
        if (root / DEMO_RECIPE).is_file():
            return root / DEMO_RECIPE
    raise ConfigError(f"there is no {DEMO_RECIPE} here: give {instead}")


def capture_rows(
    path: Path,
    overrides: Sequence[str],
    folder: Path,
    *,
    tokens: int,
    row_length: int,
    top_k: int | None,
    say: Callable[[str], None],
    show_progress: bool,
) -> Path:
    """Goes from a recipe's corpus to a cache by the product's own commands: import, prepare, capture.

    Args:
        path, overrides: the recipe, of which teacher and corpus are taken; its samples and cache are left alone, its
            teacher's checkpoint is used if it is there.
        folder: where all files go.
        tokens: to be measured; the rows for the rank table come on top.
        top_k: by default the recipe's.
        say: gets one line before the long part.

    Returns:
        The folder of the cache.

    Raises:
        ConfigError: a recipe without corpus or source of weights, or of several ranks.
        KDError: whatever the commands refuse.
    """
    rows = -(-tokens // row_length) + -(-COUNTED_POSITIONS // row_length)
    changes: dict[str, object] = {"teacher.capture.value_dtype": "float16", "teacher.capture.rows_per_shard": 1}
    if top_k is not None:
        changes["teacher.top_k"] = top_k
    recipe = shortened_recipe(path, overrides, folder, rows=rows, row_length=row_length, changes=changes)
    if recipe.data.corpus is None:
        raise ConfigError(f"{path} names no corpus to capture from: set data.corpus, or give a cache with --cache")
    if recipe.world_size != 1:
        raise ConfigError(
            f"{path} runs its teacher on {recipe.world_size} ranks, and bench cache captures on one: run "
            "`megatron-kd capture` first, then give the cache with --cache"
        )
    say(
        f"no cache yet: capturing {rows} rows of {row_length:,} tokens from {recipe.teacher.model.name} in a temporary "
        "folder; SmolLM2 takes some 10 ms a token on one core"
    )
    from megatron_kd.teacher.capture import capture

    make_inputs(recipe, show_progress=show_progress)
    capture(recipe, show_progress=show_progress)
    return folder / "cache"


def make_inputs(recipe: Recipe, *, show_progress: bool) -> None:
    """Imports the teacher, unless its checkpoint is there, and prepares the corpus, which the recipe must have.

    Raises:
        ConfigError, CheckpointError, DataError: whatever the commands refuse.
    """
    from megatron_kd.data.prepare import prepare
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.models.convert import tokenizer_source

    import_teacher(recipe, show_progress=show_progress)
    data = recipe.data
    assert data.corpus is not None, "the caller checks it: the message names what else can be given"
    prepare(
        corpus_format=data.corpus.format,
        paths=data.corpus.paths,
        text_key=data.corpus.text_key,
        tokenizer=load_tokenizer(tokenizer_source(recipe)),
        seq_length=data.seq_length,
        packing=data.packing,
        truncation=data.truncation,
        train_tokens=data.train_tokens,
        out_dir=data.samples,
        seed=recipe.seed,
        progress=show_progress,
    )


def import_teacher(recipe: Recipe, *, show_progress: bool) -> None:
    """Makes the teacher's checkpoint unless it is there; the other engines need none.

    Raises:
        ConfigError, CheckpointError: no source of weights, or damaged ones.
    """
    from megatron_kd.models.convert import import_model

    if recipe.teacher.engine == "megatron":
        import_model(recipe, "teacher", show_progress=show_progress)


def shortened_recipe(
    path: Path,
    overrides: Sequence[str],
    folder: Path,
    *,
    rows: int,
    row_length: int,
    changes: Mapping[str, object] | None = None,
) -> Recipe:
    """The recipe with so many rows of another length, its samples and its cache in ``folder``.

    Args:
        changes: more keys to set.
    """
    shortened: dict[str, object] = {
        "data.samples": str(folder / "samples"),
        "data.seq_length": row_length,
        "data.train_tokens": rows * row_length,
        "data.heldout_tokens": None,
        "teacher.mode": "offline",
        "teacher.targets": "top_k",
        "teacher.cache": str(folder / "cache"),
        **(changes or {}),
    }
    return recipe_with(path, overrides, {**shortened, **missing_checkpoint(load_recipe(path, overrides), folder)})


def missing_checkpoint(recipe: Recipe, folder: Path) -> dict[str, object]:
    """The key that lets the teacher be imported into ``folder``, where it was not imported yet; else nothing."""
    checkpoint = recipe.teacher.checkpoint
    if recipe.teacher.engine != "megatron" or (checkpoint is not None and Path(checkpoint).exists()):
        return {}
    return {"teacher.checkpoint": str(folder / "teacher")}


def recipe_with(path: Path, overrides: Sequence[str], changes: Mapping[str, object]) -> Recipe:
    """The recipe with overrides as a user gives them, then keys that are set to values."""
    return load_recipe(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
