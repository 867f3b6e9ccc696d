"""The ``megatron-kd`` command: parses, calls one function, prints. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_kd import __version__
from megatron_kd.console import (
    describe_os_error,
    is_first_rank,
    leave,
    print_figures,
    print_json,
    quiet_libraries,
    say_error,
    writing_to,
)
from megatron_kd.errors import KDError, LaunchError

app = typer.Typer(
    name="megatron-kd",
    help="Distil large language models on Megatron-Core: capture a teacher once, train students against the cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Convert Hugging Face weights.", no_args_is_help=True, rich_markup_mode=None)
cache_app = typer.Typer(help="Look into, check, compare and import teacher caches.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(convert_app, name="convert")
app.add_typer(cache_app, name="cache")
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, see recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override keys of the recipe: optimizer.lr=1e-5")
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON alone on standard output.")]


@app.command()
def show(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Print the resolved recipe.

    All files it extends, its own keys and the overrides, merged and checked, defaults filled in.
    """
    from megatron_kd.config import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if json_:
        print_json(loaded.model_dump(mode="json"))
    else:
        print(dump_recipe(loaded), end="")


@convert_app.command("import")
def convert_import(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="teacher or student: which model of the recipe.")] = "teacher",
    json_: Json = False,
) -> None:
    """Import Hugging Face weights.

    Reads model.hf of the recipe's teacher (or student) and writes its checkpoint, once, on the CPU, for any parallel
    layout. A checkpoint of the same model that is there already is reused.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [])
    if role not in ("teacher", "student"):
        raise ConfigError(f"--role is {role!r}, must be teacher or student")
    quiet_libraries()
    from megatron_kd.models.convert import import_model

    report = import_model(loaded, "teacher" if role == "teacher" else "student")
    print_figures(
        report.to_dict(),
        json_,
        f"{report.checkpoint}: {report.parameters:,} parameters{' (already there)' if report.reused else ''}",
    )


@app.command()
def prepare(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Turn the corpus into rows of tokens.

    Writes data.samples: packed rows of data.seq_length tokens, each with an id and a hash, split into train and
    held-out. The same samples that are there already are reused.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [])
    data = loaded.data
    if data.corpus is None:
        raise ConfigError("data.corpus is not set: say what to prepare, e.g. data.corpus.format=pydoc_topics")
    quiet_libraries()
    from megatron_kd.data.prepare import prepare as run
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.models.convert import tokenizer_source

    tokenizer = load_tokenizer(tokenizer_source(loaded))
    with writing_to(data.samples):
        samples = run(
            corpus_format=data.corpus.format,
            paths=data.corpus.paths,
            text_key=data.corpus.text_key,
            tokenizer=tokenizer,
            seq_length=data.seq_length,
            packing=data.packing,
            train_tokens=data.train_tokens,
            heldout_tokens=data.heldout_tokens,
            out_dir=Path(data.samples),
            seed=loaded.seed,
        )
    rows = {name: len(ids) for name, ids in samples.splits.items()}
    tokens = {name: n * samples.seq_length for name, n in rows.items()}
    text = ", ".join(f"{n} {name} rows ({tokens[name]:,} tokens)" for name, n in rows.items())
    print_figures({"samples": str(samples.path), "rows": rows, "tokens": tokens}, json_, f"{samples.path}: {text}")


@app.command()
def capture(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Score all rows with the teacher, once.

    Keeps the top-K log-probabilities of every position in teacher.cache. Started again, it does only what is missing.
    """
    from megatron_kd.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    _refuse_wrong_world(loaded)
    quiet_libraries()
    from megatron_kd.teacher.capture import capture as run

    report = run(loaded)
    figures = report.to_dict()
    print_figures(
        figures,
        json_,
        f"{loaded.teacher.cache}: {report.rows} rows, {report.rows_captured} captured now "
        f"({figures['tokens_per_s']:.0f} tokens/s), {report.bytes_per_token:.0f} bytes per token",
    )


@app.command()
def train(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Train the student, or go on training.

    Resumes from the newest checkpoint in run_dir. SIGTERM and SIGUSR1 end it with a checkpoint.
    """
    from megatron_kd.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    _refuse_wrong_world(loaded)
    quiet_libraries()
    from megatron_kd.training.loop import train as run

    with writing_to(loaded.run_dir):
        report = run(loaded)
    state = "finished" if report.finished else "stopped, start it again to go on"
    print_figures(report.to_dict(), json_, f"{report.run_dir}: iteration {report.iteration}, {state}")


@app.command()
def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|RECIPE", help="A run directory (its newest checkpoint) or a recipe (its fresh student)."
        ),
    ],
    overrides: Overrides = None,
    json_: Json = False,
) -> None:
    """Measure a student on the held-out rows.

    KD loss per token (in nats, but for tvd), perplexity and top-1 agreement with the teacher; beside them a unigram
    model's KD loss.
    The result is kept in the run directory, unless a run is measured otherwise than its own recipe says.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    if run.is_dir() and not (run / "recipe.yaml").exists():
        raise ConfigError(f"{run} is no run directory: it has no recipe.yaml")
    loaded = load_recipe(run / "recipe.yaml" if run.is_dir() else run, overrides or [])
    _refuse_wrong_world(loaded)
    quiet_libraries()
    from megatron_kd.training.evaluation_job import evaluate as job

    of_run = run.is_dir()
    result = job(loaded, run if of_run else None, keep=not (of_run and overrides))
    lines = [f"{name:22} {value:.6g}" for name, value in result.items()]
    print_figures(result, json_, "\n".join(lines))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("runs/compare"),
    json_: Json = False,
) -> None:
    """Compare runs in a table and a picture.

    Loss, step time and memory of each run, and the settings in which their recipes differ.
    """
    from megatron_kd.report import compare as run

    comparison = run(runs, out)
    if json_:
        print_json(comparison.to_json())
        return
    from rich.console import Console

    console = Console()
    console.print(comparison.table())
    console.print(f"picture: {comparison.figure}", highlight=False, soft_wrap=True)


@cache_app.command("inspect")
def cache_inspect(
    path: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache folder: teacher.cache of a recipe.")],
    json_: Json = False,
) -> None:
    """Say what a cache holds.

    Shape, teacher, bytes per token, probability mass of the kept tokens, missing rows.
    """
    from megatron_kd.cache.inspect import inspect

    seen = inspect(path)
    print_figures(seen, json_, json.dumps(seen, indent=2, ensure_ascii=False))


@cache_app.command("verify")
def cache_verify(
    path: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache folder: teacher.cache of a recipe.")],
    level: Annotated[str, typer.Option(help="inventory, structure, crc or deep.")] = "crc",
    json_: Json = False,
) -> None:
    """Check a cache for holes and damage.

    Exits with status 1 where anything is wrong. Each level includes the ones before it: inventory (files and sizes),
    structure (metadata and indices), crc (checksums), deep (every row decoded).
    """
    from typing import get_args

    from megatron_kd.cache.verify import Level, verify
    from megatron_kd.errors import ConfigError

    if level not in get_args(Level):
        raise ConfigError(f"--level is {level!r}, must be one of {', '.join(get_args(Level))}")
    report = verify(path, level, show_progress=True)  # type: ignore[arg-type]
    text = "\n".join(report.problems) if report.problems else f"{path}: no problem found at level {level}"
    print_figures(report.to_dict(), json_, text)
    if not report.ok:
        raise typer.Exit(1)


@cache_app.command("import")
def cache_import(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="megatron-lm or distillkit.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The folder that the other system wrote.")],
    samples: Annotated[Path, typer.Option(help="The samples that were scored: data.samples of a recipe.")],
    cache: Annotated[Path, typer.Option(help="The cache to fill: teacher.cache of a recipe.")],
    teacher: Annotated[str, typer.Option(help="The teacher's name, for the record.")] = "unknown",
    vocab_size: Annotated[int | None, typer.Option(help="Of the teacher; by default that of the samples.")] = None,
    rows_per_shard: Annotated[int | None, typer.Option(help="By default about two million tokens a shard.")] = None,
    trust_order: Annotated[
        bool, typer.Option("--trust-order", help="Rows without tokens were scored in the order of the samples.")
    ] = False,
    first_iteration: Annotated[int, typer.Option(help="megatron-lm: the iteration that saw sample 0.")] = 0,
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

    loaded = load_recipe(recipe, overrides or [])
    _refuse_wrong_world(loaded)
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
    first: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache folder.")],
    second: Annotated[Path, typer.Argument(metavar="CACHE", help="Another one, captured from the same samples.")],
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


@bench_app.command("loss")
def bench_loss(
    tokens: Annotated[int | None, typer.Option(help="Tokens N.")] = None,
    sweep_tokens: Annotated[str | None, typer.Option(help="Several numbers of tokens: 1024,2048,4096")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size D.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary V.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Cached tokens K.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Take the sizes of the published figures for what is not given.")
    ] = False,
    chunk_mib: Annotated[
        float | None, typer.Option(help="Budget of the chunk buffers in MiB; 64 on a CPU, 1536 on a GPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds after the warm-up.")] = 7,
    figure: Annotated[Path | None, typer.Option(help="Draw the result into this PNG file.")] = None,
    json_: Json = False,
) -> None:
    """Measure the losses beside three bare GEMMs.

    Time, counted peak bytes and FLOPs of every implementation and mode and of the peers that are installed. Without
    sizes: on a CPU 4096 tokens, hidden 512, vocabulary 32768, top 100, fp32; on a GPU the sizes of the published
    figures (8K to 256K tokens, hidden 4096, vocabulary 128256, top 100, bf16), which are then printed beside them.
    """
    from megatron_kd.errors import ConfigError

    if figure is not None and not figure.parent.is_dir():
        raise ConfigError(f"--figure {figure}: there is no folder {figure.parent}")
    if figure is not None and figure.is_dir():
        raise ConfigError(f"--figure {figure} is a folder: name a file in it")
    quiet_libraries()
    from megatron_kd.bench.loss import bench_loss as run
    from megatron_kd.bench.settings import parse_tokens

    report = run(
        tokens=parse_tokens(tokens, sweep_tokens),
        hidden=hidden,
        vocab=vocab,
        top_k=top_k,
        dtype=dtype,
        published=published,
        chunk_mib=chunk_mib,
        device=device,
        threads=threads,
        rounds=rounds,
    )
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    print_figures(report.to_json(), json_, report.text())
    if figure is not None and report.results:
        from megatron_kd.bench.figure import draw_loss_benchmark
        from megatron_kd.files import write_atomic

        write_atomic(figure, draw_loss_benchmark(report.results))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _refuse_wrong_world(recipe: Any) -> None:
    """Before torch is imported: a run started on the wrong number of ranks is refused at once."""
    from megatron_kd.config.world import check_world_size

    check_world_size(recipe, sys.argv[1:])


def main() -> None:
    """Entry point: one clear line and status 2 for what a user can mend, status 1 for what went wrong otherwise."""
    try:
        app(prog_name="megatron-kd", standalone_mode=True)
    except SystemExit as done:
        if not done.code and "megatron_kd.device" in sys.modules:
            from megatron_kd.device import destroy_distributed

            destroy_distributed()  # after a failure it is left alone: peers may be gone
        raise
    except LaunchError as error:
        # All ranks are in the same position, so one speaks for them.
        if is_first_rank():
            say_error(error)
        leave(2)
    except KDError as error:
        say_error(error)
        leave(2)
    except BrokenPipeError:
        # The reader of our output has seen enough (``megatron-kd show … | head``).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(1)
    except OSError as error:
        say_error(describe_os_error(error))
        leave(2)
