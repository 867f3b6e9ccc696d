"""The capture job: the teacher scores every sample once, and its targets become a cache.

Shards are the unit of work: a shard is written whole by one data-parallel rank, or not at all, so that a job killed
at any moment and started again, in whatever layout, does only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache, missing_shards
from megatron_kd.cache.writer import write_shard
from megatron_kd.config import Recipe
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.device import current_device, fail_together
from megatron_kd.errors import CacheError, ConfigError, DataError
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.progress import Advance, progress
from megatron_kd.teacher.engine import TeacherEngine, open_teacher
from megatron_kd.versions import installed_versions

SHARD_TOKENS = 2 * 2**20  # about half a gigabyte at K = 100
ENGINE_PACKAGES = {"megatron": "megatron-core", "hf": "transformers"}


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did, over all ranks."""

    rows: int
    rows_captured: int
    tokens_captured: int
    seconds: float
    bytes_per_token: float

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        rate = self.tokens_captured / self.seconds if self.seconds else 0.0
        return {**self.__dict__, "tokens_per_s": rate}


def rows_per_shard(recipe: Recipe) -> int:
    """The recipe's, or as many rows as make a shard of about two million tokens."""
    return recipe.teacher.capture.rows_per_shard or max(1, SHARD_TOKENS // recipe.data.seq_length)


def check_samples(recipe: Recipe, samples: SampleSet) -> None:
    """Raises DataError where the prepared samples are not those of the recipe."""
    if samples.seq_length != recipe.data.seq_length:
        raise DataError(
            f"{samples.path} holds rows of {samples.seq_length} tokens, data.seq_length is {recipe.data.seq_length}: "
            "prepare them again in another folder, or correct the recipe"
        )
    for role, model in (("teacher", recipe.teacher.model), ("student", recipe.student.model)):
        if samples.vocab_size > model.vocab_size:
            raise DataError(
                f"{samples.path} was made with a tokenizer of {samples.vocab_size} tokens "
                f"({samples.tokenizer_identity.get('name')}), {role}.model {model.name!r} knows {model.vocab_size}"
            )


def manifest_for(recipe: Recipe, samples: SampleSet, teacher: dict[str, Any]) -> tuple[CacheManifest, np.ndarray]:
    """The manifest and the rank table of this recipe's cache. Ids are numbered by their frequency in the samples."""
    table = build_rank_table(samples.token_counts(vocab_size=recipe.teacher.model.vocab_size))
    manifest = CacheManifest(
        rows=len(samples),
        rows_per_shard=rows_per_shard(recipe),
        top_k=recipe.teacher.top_k,
        vocab_size=recipe.teacher.model.vocab_size,
        rank_table_hash=rank_table_hash(table),
        value_dtype=recipe.teacher.capture.value_dtype,
        temperatures=tuple(recipe.teacher.temperatures),
        teacher=teacher,
        tokenizer=samples.tokenizer_identity,
        corpus={"content": samples.manifest["content"], "samples": samples.manifest["samples"]},
        library_versions=installed_versions(
            "megatron-kd", "torch", ENGINE_PACKAGES[recipe.teacher.engine], "numcodecs", "numpy"
        ),
    )
    return manifest, table


def capture(recipe: Recipe, *, show_progress: bool = True) -> CaptureReport:
    """Runs the job on this rank. Collective over all ranks of the recipe.

    Raises:
        ConfigError, DataError, CheckpointError: before any work.
        CacheError: the cache belongs to another teacher or other samples, or the disk refuses; on every rank.
    """
    if recipe.teacher.cache is None:
        raise ConfigError("teacher.cache is not set: name the folder the captured targets go to")
    groups = join_ranks(recipe)
    path = Path(recipe.teacher.cache)
    with fail_together("opening the samples"):
        samples = open_samples(recipe.data.samples)
        check_samples(recipe, samples)
    teacher = open_teacher(recipe, groups)
    with fail_together(f"creating the cache {path}"):
        manifest, table = manifest_for(recipe, samples, teacher.identity())
        cache = create_cache(path, manifest, table)
        todo = missing_shards(cache)
    rows_todo = sum(len(manifest.shard_samples(shard)) for shard in todo)
    started = time.monotonic()
    is_first = groups.dp_rank == 0 and groups.is_first_tp_rank
    # Shards that other ranks work on at the same time move the bar as well: it counts rows of all ranks.
    with progress(f"capture → {path}", rows_todo, unit="rows", enabled=show_progress and is_first) as advance:
        for begin in range(0, len(todo), groups.dp_size):
            mine = begin + groups.dp_rank
            together = min(groups.dp_size, len(todo) - begin)
            rows: list[Row] = []
            if mine < len(todo):
                wanted = manifest.shard_samples(todo[mine])
                rows = _score(recipe, teacher, samples, wanted, groups, advance, together)
            with fail_together(f"writing to {path}"):
                if rows and groups.is_first_tp_rank:
                    write_shard(cache, todo[mine], rows)
    seconds = time.monotonic() - started
    with fail_together(f"checking {path}"):
        left = missing_shards(cache)
        if left:
            raise CacheError(f"{path} still lacks shards {left[:5]}: run megatron-kd capture again")
        stored = sum(file.stat().st_size for file in (path / "shards").rglob("*") if file.is_file())
    tokens = len(samples) * samples.seq_length
    return CaptureReport(len(samples), rows_todo, rows_todo * samples.seq_length, seconds, stored / tokens)


def _score(
    recipe: Recipe,
    teacher: TeacherEngine,
    samples: SampleSet,
    ids: range,
    groups: ParallelGroups,
    advance: Advance,
    together: int,
) -> list[Row]:
    """The rows of one shard, scored in micro batches."""
    rows: list[Row] = []
    step = recipe.teacher.capture.micro_batch_size
    for begin in range(ids.start, ids.stop, step):
        batch_ids = range(begin, min(begin + step, ids.stop))
        rows += score_rows(teacher, samples, batch_ids, _numpy_dtype(recipe.teacher.capture.value_dtype))
        advance(len(batch_ids) * together)
    return rows


def score_rows(
    teacher: TeacherEngine, samples: SampleSet, ids: Sequence[int], dtype: type[np.floating[Any]]
) -> list[Row]:
    """Some samples as rows of a cache, scored in one forward pass. Collective over the tensor-parallel group.

    Args:
        dtype: of the log-probabilities, float16 or float32.
    """
    batch = samples.rows(ids)
    b, s = batch.tokens.shape
    extracted = teacher.top_k(torch.from_numpy(batch.tokens).to(current_device(), torch.int64))
    k = extracted.targets.top_k
    token_ids = extracted.targets.ids.view(s, b, k).cpu().numpy()
    logprobs = extracted.targets.logprobs.view(s, b, k).cpu().numpy()
    tails = extracted.targets.tail_logmass.view(s, b).cpu().numpy()
    extras = [[part.view(s, b).cpu().numpy() for part in pair] for pair in extracted.log_normalizers.values()]
    return [
        Row(
            sample_id=sample,
            tokens=batch.tokens[i],
            loss_mask=batch.loss_mask[i],
            document_offsets=batch.document_offsets[i],
            ids=np.ascontiguousarray(token_ids[:, i]),
            logprobs=np.minimum(logprobs[:, i], 0.0).astype(dtype),
            tail_logmass=np.minimum(tails[:, i], 0.0),
            log_normalizers=np.array([e[0][:, i] for e in extras], np.float32).reshape(len(extras), s),
            tail_logmass_extra=np.array([e[1][:, i] for e in extras], np.float32).reshape(len(extras), s),
        )
        for i, sample in enumerate(ids)
    ]


def _numpy_dtype(value_dtype: str) -> type[np.floating[Any]]:
    return np.float16 if value_dtype == "float16" else np.float32
