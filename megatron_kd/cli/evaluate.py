"""The command that measures a student: on held-out rows, or on public tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_kd.cli.options import Best, Json, Overrides, app, refuse_wrong_world
from megatron_kd.console import print_figures, quiet_libraries


@app.command()
def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|RECIPE", help="A run directory (its newest checkpoint) or a recipe (its fresh student)."
        ),
    ],
    overrides: Overrides = None,
    best: Best = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Instead of the held-out rows: tasks of lm-evaluation-harness, as in boolq,hellaswag, for student and "
            "teacher side by side. One process; public sets need a network.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: items of each task.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="With --tasks: examples in each prompt; by default as a task has it.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --tasks: a folder of task files of your own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="With --tasks: rows of a forward pass.")] = 8,
    chat_template: Annotated[
        bool,
        typer.Option("--chat-template", help="With --tasks: prompts as turns of the tokenizer's template."),
    ] = False,
    spread: Annotated[
        bool, typer.Option("--spread", help="With --tasks: each model over all GPUs of this machine.")
    ] = False,
    no_teacher: Annotated[bool, typer.Option("--no-teacher", help="With --tasks: the student alone.")] = False,
    keep_student: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --tasks: keep the exported student in a new folder.")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure a student on the held-out rows, or on public tasks.

    KD loss per token (in nats, but for tvd), perplexity and agreement with the teacher, calibration, and the loss by
    position and by the teacher's entropy; beside them a unigram model's KD loss. docs/evaluation.md explains each.
    The result is kept in the run directory, unless a run is measured otherwise than its own recipe says.
    """
    from megatron_kd.config import load_recipe
    from megatron_kd.errors import CheckpointError, ConfigError
    from megatron_kd.report.evaluation_text import evaluation_text, task_scores_text

    of_run = run.is_dir()
    if of_run and not (run / "recipe.yaml").exists():
        raise ConfigError(f"{run} is no run directory: it has no recipe.yaml")
    if best and not of_run:
        raise ConfigError(f"--best is for a run directory, and {run} is a recipe: leave it out")
    loaded = load_recipe(run / "recipe.yaml" if of_run else run, overrides or [])
    keep = not (of_run and overrides)
    if tasks is None:
        given = {
            "--limit": limit is not None,
            "--fewshot": fewshot is not None,
            "--include-path": include_path is not None,
            "--batch-size": batch_size != 8,
            "--chat-template": chat_template,
            "--spread": spread,
            "--no-teacher": no_teacher,
            "--keep-student": keep_student is not None,
        }
        if any(given.values()):
            first = next(name for name, is_given in given.items() if is_given)
            raise ConfigError(f"{first} goes with --tasks, which is not given: add --tasks, or leave {first} out")
        refuse_wrong_world(loaded)
        quiet_libraries()
        from megatron_kd.training.evaluation_job import evaluate as job

        result = job(loaded, run if of_run else None, keep=keep, best=best)
        print_figures(result, json_, evaluation_text(result))
        return
    if not of_run:
        raise ConfigError(f"--tasks measures a trained run, {run} is a recipe: give its run directory {loaded.run_dir}")
    if keep_student is not None and keep_student.exists():
        raise CheckpointError(f"{keep_student} exists already: remove it, or choose another --keep-student")
    names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names:
        raise ConfigError("--tasks names no task: give names as in --tasks boolq,hellaswag")
    quiet_libraries()
    from megatron_kd.training.task_scores import TaskSettings
    from megatron_kd.training.tasks_job import evaluate_tasks

    settings = TaskSettings(names, limit, include_path, fewshot, batch_size, chat_template, spread)
    scores = evaluate_tasks(
        loaded, run, settings, best=best, with_teacher=not no_teacher, keep=keep, keep_student=keep_student
    )
    print_figures(scores, json_, task_scores_text(scores["scores"]))
