"""``megatron-kd cache …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_kd.cli.options import (
    Json,
    Overrides,
    RecipeArgument,
    cache_app,
    refuse_wrong_world,
)
from megatron_kd.console import is_first_rank, print_figures, quiet_libraries


@cache_app.command("inspect")
def cache_inspect(
    path: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder or URL: teacher.cache of a recipe.")],
    rows: Annotated[int, typer.Option(min=0, help="Also show so many rows in words, spread over the cache.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Spell ids out with this tokenizer: its folder or GGUF file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Say what a cache holds.

    Shape, teacher, bytes per token, probability mass of the kept tokens, missing rows; with --rows the text of some
    positions, the token that follows and what the teacher expected.
    """
    from megatron_kd.cache.inspect import inspect, spread_samples
    from megatron_kd.cache.inspect_text import inspect_text
    from megatron_kd.errors import ConfigError

    if tokenizer is not None and not rows:
        raise ConfigError("--tokenizer spells out the rows that --rows shows: give a number of rows")
    seen = inspect(path)
    text = inspect_text(seen)
    if rows:
        quiet_libraries()
        from megatron_kd.data.decoded_rows import decode_rows, find_tokenizer

        found, why = find_tokenizer(seen["tokenizer"], path, tokenizer)
        decoded = decode_rows(path, spread_samples(path, rows), found)
        seen |= {"decoded_rows": [row.to_dict() for row in decoded], "ids_not_spelled_out": why}
        text = "\n".join([text, "", *([why] if why else []), *(row.text() for row in decoded)])
    print_figures(seen, json_, text)


@cache_app.command("verify")
def cache_verify(
    path: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder or URL: teacher.cache of a recipe.")],
    level: Annotated[str, typer.Option(help="inventory, structure, crc or deep.")] = "crc",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default as many as there are cores and work for them.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check a cache for holes and damage.

    Exits with status 1 where anything is wrong. Each level includes the ones before it: inventory (files and sizes),
    structure (metadata and indices), crc (checksums), deep (every row decoded). While a capture is still running,
    samples are missing and nothing is damaged. Where nothing of it can be read the status is 2.
    """
    from typing import get_args

    from megatron_kd.cache.verify import Level, verify
    from megatron_kd.errors import ConfigError

    if level not in get_args(Level):
        raise ConfigError(f"--level is {level!r}, must be one of {', '.join(get_args(Level))}")
    report = verify(path, level, workers=workers, show_progress=True)  # type: ignore[arg-type]
    print_figures(report.to_dict(), json_, f"{path}: {report.text()}")
    if not report.ok:
        raise typer.Exit(1)


@cache_app.command("clean")
def cache_clean(
    path: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder or URL: teacher.cache of a recipe.")],
    idle_hours: Annotated[
        float, typer.Option(min=0, help="Keep what was written to in so many hours: a capture may be at work on it.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    json_: Json = False,
) -> None:
    """Remove what crashed captures left.

    Committed shards are never touched: only attempts that no record names, temporary files, unused rank tables and
    records of shards that the cache does not have.
    """
    from megatron_kd.cache.clean import clean

    report = clean(path, idle_hours * 3600, dry_run=dry_run)
    print_figures(report.to_dict(), json_, report.text())


@cache_app.command("import")
def cache_import(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="megatron-lm or distillkit.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The folder that the other system wrote.")],
    samples: Annotated[Path, typer.Option(help="The samples that were scored: data.samples of a recipe.")],
    cache: Annotated[str, typer.Option(help="The cache to fill: teacher.cache of a recipe.")],
    teacher: Annotated[str, typer.Option(help="The teacher's name, for the record.")] = "unknown",
    vocab_size: Annotated[int | None, typer.Option(help="Of the teacher; by default that of the samples.")] = None,
    rows_per_shard: Annotated[int | None, typer.Option(help="By default about two million tokens a shard.")] = None,
    trust_order: Annotated[
        bool, typer.Option("--trust-order", help="Rows without tokens were scored in the order of the samples.")
    ] = False,
    first_iteration: Annotated[
        int, typer.Option(min=0, help="megatron-lm, files cp{C}_dp{D}__{I}.tar: the iteration that saw sample 0.")
    ] = 0,
    json_: Json = False,
) -> None:
    """Fill a cache from another system's.

    Reads the tars of Megatron-LM's offline distillation (both layouts) and DistillKit's compressed Parquet. Started
    again, it does only what is missing.
    """
    from megatron_kd.errors import ConfigError

    if rows_per_shard is not None and rows_per_shard < 1:
        raise ConfigError(f"--rows-per-shard is {rows_per_shard}, must be at least 1")
    quiet_libraries()
    from megatron_kd.cache.importers import import_cache, open_source
    from megatron_kd.data.samples import open_samples

    rows = open_samples(samples)
    size = rows.vocab_size if vocab_size is None else vocab_size
    opened = open_source(format_, source, rows, vocab_size=size, first_iteration=first_iteration)
    report = import_cache(
        opened,
        rows,
        cache,
        vocab_size=size,
        teacher=teacher,
        rows_per_shard=rows_per_shard,
        trust_order=trust_order,
        show_progress=True,
    )
    print_figures(report.to_dict(), json_, report.text())


@cache_app.command("fidelity")
def cache_fidelity(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(help="Rows of the held-out split to measure on.")] = 8,
    student: Annotated[
        Path | None, typer.Option(help="Measure the gradient on this checkpoint of the recipe's student.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.")] = None,
    json_: Json = False,
) -> None:
    """Measure what storing the top K loses.

    KL and gradient error of the stored targets against the dense teacher, by K, value dtype and tail. Where
    teacher.cache exists its rows are compared too; exits with status 1 where one is wrong.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [], trains=False)
    refuse_wrong_world(loaded)
    if figure is not None and not figure.parent.is_dir():
        raise ConfigError(f"--figure {figure}: there is no folder {figure.parent}")
    if figure is not None and figure.is_dir():
        raise ConfigError(f"--figure {figure} is a folder: name a file in it")
    quiet_libraries()
    from megatron_kd.teacher.fidelity import measure_fidelity

    report = measure_fidelity(loaded, rows, None if student is None else str(student))
    found = report.to_json()
    print_figures(found, json_, report.text())
    if figure is not None and is_first_rank():
        from megatron_kd.files import write_atomic
        from megatron_kd.teacher.fidelity_figure import draw_fidelity

        write_atomic(figure, draw_fidelity(found))
    if not report.ok:
        raise typer.Exit(1)


@cache_app.command("drift")
def cache_drift(
    first: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder or URL.")],
    second: Annotated[str, typer.Argument(metavar="CACHE", help="Another one, captured from the same samples.")],
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to compare, spread evenly; by default all.")] = None,
    json_: Json = False,
) -> None:
    """Measure how far two captures are apart.

    For two engines, precisions or versions on the same rows: KL(first ‖ second), differences of the log-probabilities,
    agreement on the likeliest token, ids that only one has.
    """
    from megatron_kd.cache.drift import cache_drift as run

    report = run(first, second, rows, show_progress=True)
    print_figures(report.to_dict(), json_, report.text())
