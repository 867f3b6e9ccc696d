"""The ``megatron-kd`` command: parses, calls one function, prints. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_kd import __version__
from megatron_kd.errors import KDError

app = typer.Typer(
    name="megatron-kd",
    help="Distil large language models on Megatron-Core: capture a teacher once, train students against the cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Hugging Face weights to Megatron distributed checkpoints.", no_args_is_help=True)
cache_app = typer.Typer(help="Look into a teacher cache and check it.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
app.add_typer(cache_app, name="cache")

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/smollm2_cpu.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override keys of the recipe.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON alone on standard output.")]


@app.command()
def show(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Print the resolved recipe."""
    from megatron_kd.config import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if json_:
        _print_json(loaded.model_dump(mode="json"))
    else:
        print(dump_recipe(loaded), end="")


@convert_app.command("import")
def convert_import(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="teacher or student: which model of the recipe.")] = "teacher",
    json_: Json = False,
) -> None:
    """Import model.hf of the recipe's teacher (or student) into its checkpoint folder."""
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [])
    if role not in ("teacher", "student"):
        raise ConfigError(f"--role is {role!r}, must be teacher or student")
    _quiet_libraries()
    from megatron_kd.models.convert import import_model

    report = import_model(loaded, "teacher" if role == "teacher" else "student")
    _figures(
        report.to_dict(),
        json_,
        f"{report.checkpoint}: {report.parameters:,} parameters{' (already there)' if report.reused else ''}",
    )


@app.command()
def prepare(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Turn the recipe's corpus into samples: packed rows of tokens with ids and hashes."""
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [])
    data = loaded.data
    if data.corpus is None:
        raise ConfigError("data.corpus is not set: say what to prepare, e.g. data.corpus.format=pydoc_topics")
    _quiet_libraries()
    from megatron_kd.data.prepare import prepare as run
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.models.convert import tokenizer_source

    samples = run(
        corpus_format=data.corpus.format,
        paths=data.corpus.paths,
        text_key=data.corpus.text_key,
        tokenizer=load_tokenizer(tokenizer_source(loaded)),
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
    _figures({"samples": str(samples.path), "rows": rows, "tokens": tokens}, json_, f"{samples.path}: {text}")


@app.command()
def capture(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Score all samples with the teacher and keep its top-K targets; resumes where it stopped."""
    from megatron_kd.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    _refuse_wrong_world(loaded)
    _quiet_libraries()
    from megatron_kd.teacher.capture import capture as run

    report = run(loaded)
    figures = report.to_dict()
    _figures(
        figures,
        json_,
        f"{loaded.teacher.cache}: {report.rows} rows, {report.rows_captured} captured now "
        f"({figures['tokens_per_s']:.0f} tokens/s), {report.bytes_per_token:.0f} bytes per token",
    )


@app.command()
def train(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Train the student; resumes from the last checkpoint of its run directory."""
    from megatron_kd.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    _refuse_wrong_world(loaded)
    _quiet_libraries()
    from megatron_kd.training.loop import train as run

    report = run(loaded)
    state = "finished" if report.finished else "stopped, start it again to go on"
    _figures(report.to_dict(), json_, f"{report.run_dir}: iteration {report.iteration}, {state}")


@app.command()
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="A run directory (its newest checkpoint) or a recipe (its fresh student)")
    ],
    overrides: Overrides = None,
    json_: Json = False,
) -> None:
    """Held-out KD loss, perplexity and top-1 agreement; beside them a unigram model's KD loss."""
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    if run.is_dir() and not (run / "recipe.yaml").exists():
        raise ConfigError(f"{run} is no run directory: it has no recipe.yaml")
    loaded = load_recipe(run / "recipe.yaml" if run.is_dir() else run, overrides or [])
    _refuse_wrong_world(loaded)
    _quiet_libraries()
    from megatron_kd.training.evaluation_job import evaluate as job

    result = job(loaded, run if run.is_dir() else None)
    lines = [f"{name:22} {value:.6g}" for name, value in result.items()]
    _figures(result, json_, "\n".join(lines))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories")],
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("runs/compare"),
    json_: Json = False,
) -> None:
    """Compare runs: a table, the differences of their recipes, a picture of loss, time and memory."""
    from megatron_kd.report import compare as run

    comparison = run(runs, out)
    if json_:
        _print_json(comparison.to_json())
        return
    from rich.console import Console

    console = Console()
    console.print(comparison.table())
    for note in comparison.notes:
        console.print(note, highlight=False)
    console.print(f"picture: {comparison.figure}", highlight=False, soft_wrap=True)


@cache_app.command("inspect")
def cache_inspect(path: Annotated[Path, typer.Argument(help="A cache folder")], json_: Json = False) -> None:
    """What a cache holds: shape, teacher, bytes per token, mass of the kept tokens, holes."""
    from megatron_kd.cache.inspect import inspect

    seen = inspect(path)
    _figures(seen, json_, json.dumps(seen, indent=2, ensure_ascii=False))


@cache_app.command("verify")
def cache_verify(
    path: Annotated[Path, typer.Argument(help="A cache folder")],
    level: Annotated[str, typer.Option(help="inventory, structure, crc or deep")] = "crc",
    json_: Json = False,
) -> None:
    """Check a cache; exits with status 1 where anything is wrong."""
    from typing import get_args

    from megatron_kd.cache.verify import Level, verify
    from megatron_kd.errors import ConfigError

    if level not in get_args(Level):
        raise ConfigError(f"--level is {level!r}, must be one of {', '.join(get_args(Level))}")
    report = verify(path, level, show_progress=True)  # type: ignore[arg-type]
    text = "\n".join(report.problems) if report.problems else f"{path}: no problem found at level {level}"
    _figures(report.to_dict(), json_, text)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _refuse_wrong_world(recipe: Any) -> None:
    """Before torch is imported: a run started on the wrong number of ranks is refused at once."""
    from megatron_kd.config.world import check_world_size

    check_world_size(recipe, sys.argv[1:])


def _quiet_libraries() -> None:
    """Silences what other libraries say while they are imported and set up; their errors still come through."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        # Redrawn bars make one endless line of a log file; our own bars print lines there.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not os.path.exists("/dev/nvidiactl"):
        # Small helpers of Megatron-Core are compiled at their first use, which needs a C++ compiler and seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _figures(value: Any, as_json: bool, text: str) -> None:
    if _is_first_rank():
        if as_json:
            _print_json(value)
        else:
            print(text)


def main() -> None:
    """Entry point: one clear line and status 2 for what a user can mend, status 1 for what went wrong otherwise."""
    try:
        app(standalone_mode=True)
    except KDError as error:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print(f"megatron-kd: {rank}error: {error}", file=sys.stderr, flush=True)
        _leave(2)


def _leave(status: int) -> None:
    """Ends the process without waiting for peers: a rank that failed must not hang in a collective's destructor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
