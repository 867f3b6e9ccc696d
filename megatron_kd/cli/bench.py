"""``megatron-kd bench …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_kd.cli.options import (
    Json,
    Overrides,
    bench_app,
    refuse_wrong_world,
)
from megatron_kd.console import is_first_rank, print_figures, quiet_libraries


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


@bench_app.command("cache")
def bench_cache(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Measure its teacher.cache, or what its teacher captures.")
    ] = None,
    overrides: Overrides = None,
    cache: Annotated[str | None, typer.Option(help="Measure the rows of this cache, a folder or URL.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure the sizes on.")] = 8192,
    row_length: Annotated[
        int | None,
        typer.Option(help="Capture rows of this many tokens even where there is a cache; by default 2048, if none is."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the first K tokens of each position.")] = None,
    rate_tokens: Annotated[int, typer.Option(help="Tokens to take the rates on; rows are repeated.")] = 131072,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of the rates.")] = 7,
    json_: Json = False,
) -> None:
    """Measure the cache beside other formats.

    Bytes per token and tokens per CPU second, written, read in random order, in slices of two context-parallel ranks
    and in order: this cache, Megatron-LM's tars, Parquet. What is read back is compared with what was written.

    Without a recipe and a cache, the demo's teacher captures 10,240 tokens into a temporary folder first, in one to
    two minutes.
    """
    quiet_libraries()
    from megatron_kd.bench.cache import bench_cache as run

    report = run(
        recipe,
        overrides or [],
        cache=cache,
        tokens=tokens,
        row_length=row_length,
        top_k=top_k,
        rate_tokens=rate_tokens,
        rounds=rounds,
        say=lambda line: typer.echo(line, err=True),
    )
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    print_figures(report.to_json(), json_, report.text())


@bench_app.command("capture")
def bench_capture(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Measure its teacher; by default that of the demo.")
    ] = None,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows to measure on, in whole micro batches; five of these by default.")
    ] = None,
    row_length: Annotated[int | None, typer.Option(help="Tokens in a row; by default data.seq_length.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU, by default 1.")] = None,
    json_: Json = False,
) -> None:
    """Measure what a capture costs beyond the teacher.

    The teacher's bare forward pass (hidden states, then all logits, chunk by chunk) beside all a capture does: forward
    pass and top-K, rows, shards; with the recipe's engine in the layout that is started. Round by round on the rows of
    data.samples, or of the recipe's corpus where they are not there; CPU time, on a GPU that of the clock.
    """
    if recipe is not None:
        from megatron_kd.config import load_recipe

        refuse_wrong_world(load_recipe(recipe, overrides or []))
    quiet_libraries()
    from megatron_kd.bench.capture import bench_capture as run

    report = run(
        recipe,
        overrides or [],
        rows=rows,
        row_length=row_length,
        threads=threads,
        say=lambda line: typer.echo(line, err=True),
    )
    for note in report.notes if is_first_rank() else ():
        typer.echo(f"note: {note}", err=True)
    print_figures(report.to_json(), json_, report.text())


@bench_app.command("step")
def bench_step(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Measure its student, in its layout and batch.")],
    overrides: Overrides = None,
    methods: Annotated[
        str, typer.Option(help="Implementations of the loss beside plain cross-entropy: fused,forward_chunked,dense")
    ] = "fused",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds after the warm-up.")] = 7,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    json_: Json = False,
) -> None:
    """Measure what distillation adds to a training step.

    Whole optimizer steps of the recipe's student: by plain cross-entropy on labels, Megatron-Core's own path, and by
    offline distillation, one after the other in every round, on one model. Rows, targets and weights are made up:
    nothing is read.
    """
    from megatron_kd.config import load_recipe

    refuse_wrong_world(load_recipe(recipe, overrides or []))
    quiet_libraries()
    from megatron_kd.bench.step import bench_step as run

    report = run(
        recipe,
        overrides or [],
        methods=[name.strip() for name in methods.split(",") if name.strip()],
        rounds=rounds,
        threads=threads,
    )
    for note in report.notes if is_first_rank() else ():
        typer.echo(f"note: {note}", err=True)
    print_figures(report.to_json(), json_, report.text())
