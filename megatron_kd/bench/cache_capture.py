"""Targets for ``bench cache`` where there are none: a teacher scores a little text into a temporary folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_kd.bench.cache_rows import COUNTED_POSITIONS
from megatron_kd.config import Recipe, load_recipe
from megatron_kd.errors import ConfigError

DEMO_RECIPE = Path("recipes/smollm2_cpu.yaml")
ROW_LENGTH = 2048


def find_demo_recipe() -> Path:
    """The demo's recipe, here or in the repository that this package is run from.

    Raises:
        ConfigError: in neither, as where the package alone is installed.
    """
    for root in (Path(), Path(__file__).resolve().parents[2]):
        if (root / DEMO_RECIPE).is_file():
            return root / DEMO_RECIPE
    raise ConfigError(f"there is no {DEMO_RECIPE} here: give a recipe, or an existing cache with --cache")


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
    recipe = _shortened(path, overrides, folder, rows, row_length, top_k)
    corpus = recipe.data.corpus
    if corpus is None:
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
    from megatron_kd.data.prepare import prepare
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.models.convert import import_model, tokenizer_source
    from megatron_kd.teacher.capture import capture

    if recipe.teacher.engine == "megatron":
        import_model(recipe, "teacher", show_progress=show_progress)
    data = recipe.data
    prepare(
        corpus_format=corpus.format,
        paths=corpus.paths,
        text_key=corpus.text_key,
        tokenizer=load_tokenizer(tokenizer_source(recipe)),
        seq_length=data.seq_length,
        packing=data.packing,
        train_tokens=data.train_tokens,
        out_dir=data.samples,
        seed=recipe.seed,
        progress=show_progress,
    )
    capture(recipe, show_progress=show_progress)
    return folder / "cache"


def _shortened(
    path: Path, overrides: Sequence[str], folder: Path, rows: int, row_length: int, top_k: int | None
) -> Recipe:
    """The recipe with a few rows of another length, all of it in ``folder``."""
    loaded = load_recipe(path, overrides)
    changes: dict[str, object] = {
        "data.samples": str(folder / "samples"),
        "data.seq_length": row_length,
        "data.train_tokens": rows * row_length,
        "data.heldout_tokens": None,
        "teacher.mode": "offline",
        "teacher.targets": "top_k",
        "teacher.cache": str(folder / "cache"),
        "teacher.capture.value_dtype": "float16",
        "teacher.capture.rows_per_shard": 1,
    }
    checkpoint = loaded.teacher.checkpoint
    if loaded.teacher.engine == "megatron" and (checkpoint is None or not Path(checkpoint).exists()):
        changes["teacher.checkpoint"] = str(folder / "teacher")
    if top_k is not None:
        changes["teacher.top_k"] = top_k
    return load_recipe(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
