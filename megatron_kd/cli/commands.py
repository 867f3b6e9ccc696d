"""The commands that take a recipe from text to a trained student, and the entry point."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_kd import __version__
from megatron_kd.cli.options import Best, Json, Overrides, RecipeArgument, app, convert_app, refuse_wrong_world
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


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Print the value of this key alone, as in cluster.nodes; can be repeated."),
    ] = None,
    for_capture: Annotated[
        bool,
        typer.Option("--for-capture", help="Check as capture does: its ranks need not divide the batch."),
    ] = False,
    json_: Json = False,
) -> None:
    """Print the resolved recipe.

    All files it extends, its own keys and the overrides, merged and checked, defaults filled in. With --json also how
    many parameters teacher and student have, counted on models built without memory for their weights.
    With --field one value a line, in the order asked for: text as it is, an empty line for null, all else as JSON.
    """
    from megatron_kd.config import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or [], trains=not for_capture)
    if field:
        from megatron_kd.config.fields import field_line, field_values

        values = field_values(loaded, field)
        if json_:
            print_json(values)
        else:
            print("\n".join([field_line(name, values[name]) for name in field]))
    elif json_:
        quiet_libraries()
        from megatron_kd.models.counts import count_alone

        counts = count_alone({"teacher": loaded.teacher.model, "student": loaded.student.model})
        print_json(
            {
                **loaded.model_dump(mode="json"),
                "parameters": {role: count.total for role, count in counts.items()},
                "active_parameters": {role: count.active for role, count in counts.items()},
            }
        )
    else:
        print(dump_recipe(loaded), end="")


@convert_app.command("import")
def convert_import(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    role: Annotated[str, typer.Option(help="teacher or student: which model of the recipe.")] = "teacher",
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read .bin and .pt files where there is no safetensors file; trust their origin first.",
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Import Hugging Face weights.

    Reads model.hf of the recipe's teacher (or student) and writes its checkpoint, once, for any parallel layout: alone
    on the CPU, under torchrun in the recipe's layout. A checkpoint of the same model that is there already is reused.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import ConfigError

    loaded = load_recipe(recipe, overrides or [])
    if role not in ("teacher", "student"):
        raise ConfigError(f"--role is {role!r}, must be teacher or student")
    quiet_libraries()
    from megatron_kd.models.convert import import_model

    report = import_model(loaded, "teacher" if role == "teacher" else "student", allow_pickle=allow_pickle)
    print_figures(
        report.to_dict(),
        json_,
        f"{report.checkpoint}: {report.parameters:,} parameters{' (already there)' if report.reused else ''}",
    )


@convert_app.command("export")
def convert_export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT|RUN", help="A checkpoint, or a run directory: its newest checkpoint."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one file of weights.")] = "5GB",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; without it the stored one.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face folder, instead of the checkpoint's own tokenizer.")
    ] = None,
    best: Best = False,
    json_: Json = False,
) -> None:
    """Export weights to Hugging Face.

    Writes a folder that transformers loads: safetensors, config.json and the tokenizer. Of a training checkpoint, the
    student's weights. One process, a tensor at a time.
    """
    from megatron_kd.errors import CheckpointError

    if output.exists():  # before torch is imported
        raise CheckpointError(f"{output} exists already: remove it, or choose another --output")
    quiet_libraries()
    from megatron_kd.models.export import parse_dtype, parse_size
    from megatron_kd.training.export_job import export

    with writing_to(str(output)):
        report = export(
            checkpoint,
            output,
            max_shard_bytes=parse_size(max_shard_size),
            dtype=parse_dtype(dtype),
            tokenizer=tokenizer,
            best=best,
        )
    print_figures(
        report.to_dict(),
        json_,
        f"{report.output}: {report.parameters:,} parameters of {report.checkpoint} in {report.dtype}, "
        f"{report.files} file{'' if report.files == 1 else 's'}",
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
            truncation=data.truncation,
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
def capture(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Do the I-th of N parts, counted from 1, and leave the others to other jobs: "
            "--part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT under sbatch --array=1-N.",
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Compare the checksums of what is there and capture damaged shards again."),
    ] = False,
    status: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the state of this job in a JSON file, as train does in status.json."),
    ] = None,
    json_: Json = False,
) -> None:
    """Score all rows with the teacher, once.

    Keeps the top-K log-probabilities of every position in teacher.cache. Started again, it does only what is missing.
    SIGTERM and SIGUSR1 end it with what is done so far and status 0; the file of --status then says stopped.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.teacher.part import WHOLE, Part

    share = WHOLE if part is None else Part.parse(part)
    loaded = load_recipe(recipe, overrides or [], trains=False)
    refuse_wrong_world(loaded)
    quiet_libraries()
    from megatron_kd.status import JobStatus
    from megatron_kd.teacher.capture import capture as run

    with JobStatus(status if is_first_rank() else None) as ending:
        ending.begin()
        report = run(loaded, part=share, repair=repair)
        ending.ends(finished=not report.stopped)
    state = "complete"
    if not report.complete:
        state = (
            f"{'stopped, start it again to go on; ' if report.stopped else ''}missing: samples {report.missing_samples}"
        )
    print_figures(
        report.to_dict(),
        json_,
        f"{loaded.teacher.cache}: {report.rows} rows, {report.rows_captured} captured now "
        f"({report.tokens_per_s:.0f} tokens/s), {report.bytes_per_token:.0f} bytes per token, {state}",
    )


@app.command()
def train(recipe: RecipeArgument, overrides: Overrides = None, json_: Json = False) -> None:
    """Train the student, or go on training.

    Resumes from the newest checkpoint in run_dir. SIGTERM and SIGUSR1 end it with a checkpoint.
    """
    from megatron_kd.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    refuse_wrong_world(loaded)
    quiet_libraries()
    from megatron_kd.training.loop import train as run

    with writing_to(loaded.run_dir):
        report = run(loaded)
    state = report.reason or ("finished" if report.finished else "stopped, start it again to go on")
    print_figures(report.to_dict(), json_, f"{report.run_dir}: iteration {report.iteration}, {state}")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: one clear line and status 2 for what a user can mend, status 1 for what went wrong otherwise."""
    try:
        try:
            app(prog_name="megatron-kd", standalone_mode=True)
        finally:
            # What is still buffered would meet a reader that has gone only while Python ends, too late to be caught.
            sys.stdout.flush()
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
