"""``bench capture``: what a capture costs beyond the teacher's bare forward pass, on the recipe's engine and layout."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_kd.bench.cache_capture import (
    find_demo_recipe,
    import_teacher,
    make_inputs,
    missing_checkpoint,
    recipe_with,
    shortened_recipe,
)
from megatron_kd.bench.capture_bare import bare_forward, check_engine
from megatron_kd.bench.capture_measure import Subject, clock_name, measure_rounds, summarize
from megatron_kd.bench.capture_table import capture_table
from megatron_kd.bench.neighbours import Neighbours
from megatron_kd.bench.settings import check_positive
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.store import create_cache
from megatron_kd.config import Recipe
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.device import current_device, fail_together, first_rank_tells, is_cuda
from megatron_kd.device.platform import CPU_NAME
from megatron_kd.errors import ConfigError, DataError
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.progress import progress
from megatron_kd.teacher.capture_cache import check_samples, check_tokenizer, manifest_for, rows_per_shard
from megatron_kd.teacher.engine import TeacherEngine, open_teacher
from megatron_kd.teacher.rank_probe import count_scored_ids
from megatron_kd.teacher.score import row_dtype

DEFAULT_ROUNDS = 5
SHARD_TOKENS = 16384
"""Tokens in a shard at the most: enough that what a shard costs once does not show."""


@dataclass(frozen=True)
class CaptureBenchmark:
    """One row of the result, see ``summarize``, and what a reader of it must know."""

    results: list[dict[str, Any]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """``results`` and ``notes``."""
        return {"results": self.results, "notes": self.notes}

    def text(self) -> str:
        """A table of the parts, and the overhead."""
        return "\n\n".join(map(capture_table, self.results))


def bench_capture(
    recipe: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    rows: int | None = None,
    row_length: int | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> CaptureBenchmark:
    """Measures the parts of a capture beside the bare forward pass. Collective over all ranks of the recipe.

    Every data-parallel rank does the same work; the result is that of the calling rank.

    Args:
        recipe, overrides: whose teacher, engine and layout are measured, by default the demo's; on its samples where
            they are there, else on rows of its corpus prepared in a temporary folder.
        rows: rounded up to whole micro batches, each of which is a round; by default five micro batches.
        row_length: by default that of the recipe.
        threads: of torch on a CPU; by default training.threads, else 1.
        say: gets what should be known before the long parts.

    Raises:
        ConfigError: options that cannot be, an engine without hidden states, several ranks without prepared samples.
        KDError: a recipe that could not be captured either.
    """
    for name, value in (("rows", rows), ("row-length", row_length), ("threads", threads)):
        check_positive(name, value)
    path = find_demo_recipe("a recipe") if recipe is None else Path(recipe)
    with tempfile.TemporaryDirectory(prefix="megatron-kd-bench-") as name:
        folder = Path(name)
        loaded = _with_inputs(path, overrides, folder, rows, row_length, threads, say, show_progress)
        loaded = loaded.in_teacher_layout()
        groups = join_ranks(loaded)
        with fail_together("opening the samples"):
            samples = open_samples(loaded.data.samples)
            check_samples(loaded, samples)
            if not len(samples):
                raise DataError(f"{samples.path} has no rows to measure on: prepare some")
        first_rank_tells("comparing the tokenizers", lambda: check_tokenizer(loaded, samples))
        teacher = open_teacher(loaded, groups)
        batches = micro_batches(loaded, samples, rows)
        subject = _subject(loaded, samples, teacher, groups, len(batches), folder)
        show = show_progress and groups.dp_rank == 0 and groups.is_first_tp_rank
        with progress("bench capture", 1 + len(batches), unit="rounds", enabled=show) as advance:
            neighbours = Neighbours()
            rounds = measure_rounds(subject, batches, advance)
            notes = [] if is_cuda() else neighbours.notes(torch.get_num_threads())
        source = _source(loaded, folder)
    row = {**_setting(loaded, samples, groups, batches), "source": source, "clock": clock_name(), **summarize(rounds)}
    return CaptureBenchmark([row], notes + _notes(groups))


def micro_batches(recipe: Recipe, samples: SampleSet, rows: int | None) -> list[list[int]]:
    """Sample ids spread over all rows, in whole micro batches; where there are fewer rows, some come again."""
    size = recipe.teacher.capture.micro_batch_size
    count = DEFAULT_ROUNDS if rows is None else math.ceil(rows / size)
    ids = [i * len(samples) // (count * size) for i in range(count * size)]
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


def _with_inputs(
    path: Path,
    overrides: Sequence[str],
    folder: Path,
    rows: int | None,
    row_length: int | None,
    threads: int | None,
    say: Callable[[str], None],
    show_progress: bool,
) -> Recipe:
    """The recipe with samples and a teacher that are there; what is not is made in ``folder``."""
    loaded = recipe_with(path, overrides, {})
    check_engine(loaded)
    for axis, kind in (("pipeline_model", "of one stage"), ("context", "on whole rows")):
        size = getattr(loaded.in_teacher_layout().parallelism, f"{axis}_parallel_size")
        if size > 1:
            raise ConfigError(
                f"bench capture measures a teacher {kind}, parallelism.{axis}_parallel_size is {size}: set it to 1"
            )
    changes: dict[str, object] = {}
    if threads is not None:
        changes["training.threads"] = threads
    elif loaded.training.threads is None and loaded.cluster.gpu == CPU_NAME:
        changes["training.threads"] = 1
    length = row_length or loaded.data.seq_length
    if Path(loaded.data.samples).exists() and length in (loaded.data.seq_length, _length_of(loaded)):
        changes["data.seq_length"] = length
        if loaded.world_size == 1:
            changes |= missing_checkpoint(loaded, folder)
        ready = recipe_with(path, overrides, changes)
        if "teacher.checkpoint" in changes:
            import_teacher(ready, show_progress=show_progress)
        return ready
    if loaded.world_size != 1:
        raise ConfigError(
            f"there are no rows of {length} tokens in {loaded.data.samples}, and {path} runs its teacher on "
            f"{loaded.world_size} ranks: run `megatron-kd prepare` and `megatron-kd convert import` first, with "
            f"data.seq_length={length}"
        )
    if loaded.data.corpus is None:
        raise ConfigError(f"{path} names no corpus to take rows from: set data.corpus, or prepare its samples first")
    count = rows or DEFAULT_ROUNDS * loaded.teacher.capture.micro_batch_size
    say(f"no rows of {length:,} tokens yet: preparing {count} in a temporary folder")
    made = shortened_recipe(path, overrides, folder, rows=count, row_length=length, changes=changes)
    make_inputs(made, show_progress=show_progress)
    return made


def _length_of(recipe: Recipe) -> int:
    return open_samples(recipe.data.samples).seq_length


def _subject(
    recipe: Recipe,
    samples: SampleSet,
    teacher: TeacherEngine,
    groups: ParallelGroups,
    rounds: int,
    folder: Path,
) -> Subject:
    """The teacher, its bare forward pass, and on ranks that write an empty cache as a capture would make it."""
    scored = count_scored_ids(recipe, samples, teacher, groups)
    cache = None
    with fail_together(f"creating a cache in {folder}"):
        if groups.is_first_tp_rank:
            table = build_rank_table(samples.token_counts(vocab_size=recipe.teacher.model.vocab_size), scored)
            shard = shard_rows(recipe)
            manifest = replace(
                manifest_for(recipe, samples, teacher.identity()),
                rows=(1 + rounds) * shard,
                rows_per_shard=shard,
                rank_table_hash=rank_table_hash(table),
            )
            cache = create_cache(folder / "measured", manifest, table)
    bare = bare_forward(teacher, recipe, groups)
    return Subject(teacher, bare, samples, cache, row_dtype(recipe.teacher.capture.value_dtype))


def shard_rows(recipe: Recipe) -> int:
    """Rows in a shard: the recipe's, up to ``SHARD_TOKENS``."""
    return min(rows_per_shard(recipe), max(1, SHARD_TOKENS // recipe.data.seq_length))


def _source(recipe: Recipe, folder: Path) -> str:
    """Where the rows come from."""
    if not Path(recipe.data.samples).is_relative_to(folder):
        return recipe.data.samples
    assert recipe.data.corpus is not None
    return f"prepared from {recipe.data.corpus.format}"


def _setting(
    recipe: Recipe, samples: SampleSet, groups: ParallelGroups, batches: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What was measured, and on what."""
    teacher = recipe.teacher
    return {
        "teacher": teacher.model.name,
        "engine": teacher.engine,
        "dtype": (teacher.hf.dtype if teacher.engine == "hf" else None) or recipe.training.precision,
        "top_k": teacher.top_k,
        "temperatures": list(teacher.temperatures),
        "vocab": teacher.model.vocab_size,
        "rows": sum(map(len, batches)),
        "row_tokens": samples.seq_length,
        "micro_batch_size": len(batches[0]),
        "shard_tokens": shard_rows(recipe) * samples.seq_length,
        "rounds": len(batches),
        "ranks": recipe.world_size,
        "tensor_parallel": groups.tp_size,
        "data_parallel": groups.dp_size,
        "device": current_device().type,
        "threads": torch.get_num_threads(),
    }


def _notes(groups: ParallelGroups) -> list[str]:
    notes = ["the bare forward's logits are float32, chunk by chunk into one buffer, as those of a capture"]
    if is_cuda():
        notes.append("a capture writes beside the next forward pass: with the writer added, the overhead is a bound")
    if groups.tp_size * groups.dp_size > 1:
        notes.append("the figures are those of the first rank, tokens per second those of one data-parallel rank")
    return notes
