"""What a capture settles before it scores: samples of the recipe, a cache of these samples, nothing in it damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_kd.cache.commits import discard_shard, read_commits
from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.presence import make_folders, require_shards
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.store import (
    Cache,
    cache_exists,
    committed_shards,
    create_cache,
    open_same_cache,
    samples_of,
    shards_in_words,
)
from megatron_kd.cache.verify import Level, verify
from megatron_kd.config import Recipe
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.device import fail_together, first_rank_tells
from megatron_kd.errors import CacheError, DataError, StoreUnreachableError
from megatron_kd.models.checkpoint import read_note
from megatron_kd.models.hf_source import resolve_source
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.rank_probe import count_scored_ids
from megatron_kd.versions import installed_versions

SHARD_TOKENS = 2 * 2**20  # about half a gigabyte at K = 100
ENGINE_PACKAGES = {"megatron": "megatron-core", "hf": "transformers", "vllm": "vllm"}


def check_samples(recipe: Recipe, samples: SampleSet) -> None:
    """Raises DataError where the prepared samples are not those of the recipe."""
    if samples.seq_length != recipe.data.seq_length:
        raise DataError(
            f"{samples.path} holds rows of {samples.seq_length} tokens, data.seq_length is {recipe.data.seq_length}: "
            "prepare them again in another folder, or correct the recipe"
        )
    if samples.packing != recipe.data.packing:
        raise DataError(
            f"{samples.path} holds rows packed as {samples.packing!r}, data.packing is {recipe.data.packing!r}: "
            "prepare them again in another folder, or correct the recipe"
        )
    for role, model in (("teacher", recipe.teacher.model), ("student", recipe.student.model)):
        if samples.vocab_size > model.vocab_size:
            raise DataError(
                f"{samples.path} was made with a tokenizer of {samples.vocab_size} tokens "
                f"({samples.tokenizer_identity.get('name')}), {role}.model {model.name!r} knows {model.vocab_size}"
            )


def check_tokenizer(recipe: Recipe, samples: SampleSet) -> None:
    """Raises DataError where the ids of the samples mean other tokens to the teacher, as far as its tokenizer is known.

    Text that is only cut otherwise passes: each id still means the same.
    """
    known = _teacher_tokenizer(recipe)
    ours = samples.tokenizer_identity
    if known is not None and known["sha256"] != ours.get("sha256"):
        raise DataError(
            f"{samples.path} was made with the tokenizer {ours.get('name')!r} ({ours.get('vocab_size')} tokens), the "
            f"teacher's is {known['name']!r} ({known['vocab_size']} tokens), and their ids mean different tokens: "
            "prepare the samples again, in another folder, with the teacher's tokenizer (data.tokenizer)"
        )


def _teacher_tokenizer(recipe: Recipe) -> dict[str, Any] | None:
    """The identity of the tokenizer that came with the weights, None where none is at hand."""
    teacher = recipe.teacher
    if teacher.engine == "megatron" and teacher.checkpoint is not None:
        noted = read_note(Path(teacher.checkpoint)).get("tokenizer")
        if noted is not None:
            return dict(noted)
    if teacher.model.hf is None:
        return None
    source = resolve_source(teacher.model.hf)
    if source.suffix != ".gguf" and not (source / "tokenizer.json").is_file():
        return None
    return load_tokenizer(source).identity()


def rows_per_shard(recipe: Recipe) -> int:
    """The recipe's, or as many rows as make a shard of about two million tokens."""
    return recipe.teacher.capture.rows_per_shard or max(1, SHARD_TOKENS // recipe.data.seq_length)


def manifest_for(recipe: Recipe, samples: SampleSet, teacher: dict[str, Any]) -> CacheManifest:
    """The manifest of this recipe's cache, but for its numbering of ids: any is right.

    Args:
        teacher: the identity of the engine.
    """
    return CacheManifest(
        rows=len(samples),
        rows_per_shard=rows_per_shard(recipe),
        top_k=recipe.teacher.top_k,
        vocab_size=recipe.teacher.model.vocab_size,
        rank_table_hash="",
        value_dtype=recipe.teacher.capture.value_dtype,
        temperatures=tuple(recipe.teacher.temperatures),
        teacher=teacher,
        tokenizer=samples.tokenizer_identity,
        corpus={"content": samples.manifest["content"], "samples": samples.manifest["samples"]},
        library_versions=installed_versions(
            "megatron-kd", "torch", ENGINE_PACKAGES[recipe.teacher.engine], "numcodecs", "numpy"
        ),
    )


def open_or_create_cache(recipe: Recipe, samples: SampleSet, teacher: TeacherEngine, groups: ParallelGroups) -> Cache:
    """The cache of the recipe; the first job makes it, with ids numbered by how often the teacher proposes them.

    Of several first jobs one publishes its numbering, the others adopt that. Collective over all ranks.

    Raises:
        CacheError: another cache stands there, or the disk refuses.
        RemoteRankError: that happened on another rank.
    """
    path = str(recipe.teacher.cache)
    manifest = manifest_for(recipe, samples, teacher.identity())
    # One looks for all: a cache that appears meanwhile must not send some ranks scoring and others not.
    if not first_rank_tells(f"looking for the cache {path}", lambda: cache_exists(path)):
        scored = count_scored_ids(recipe, samples, teacher, groups)

        def create() -> None:
            tokens = samples.token_counts(vocab_size=recipe.teacher.model.vocab_size)
            table = build_rank_table(tokens, scored)
            create_cache(path, replace(manifest, rank_table_hash=rank_table_hash(table)), table)

        first_rank_tells(f"creating the cache {path}", create)
    with fail_together(f"opening the cache {path}"):
        cache = open_same_cache(path, manifest)
    first_rank_tells(f"looking into the cache {path}", lambda: make_folders(cache))
    return cache


@dataclass(frozen=True)
class Committed:
    """What is known of committed shards, so that their records need not be read again.

    Attributes:
        shards: which.
        bytes: of their files and records.
        tokens: that they hold.
    """

    shards: frozenset[int] = frozenset()
    bytes: int = 0
    tokens: int = 0

    def with_new(self, cache: Cache, committed: Iterable[int]) -> Committed:
        """Adds what became known since: reads the records of those of ``committed`` that are not counted yet.

        Raises CacheError for a record that cannot be read.
        """
        new = [shard for shard in committed if shard not in self.shards]
        stored, tokens = self.bytes, self.tokens
        for record in read_commits(cache, new):
            stored += record.stored_bytes + len(record.to_json())
            tokens += record.tokens
        return Committed(self.shards.union(new), stored, tokens)


def check_committed(cache: Cache, shards: range, *, repair: bool, show_progress: bool) -> Committed:
    """Looks at what is committed already. Collective over all ranks.

    Args:
        shards: those that count; others are not read.
        repair: every checksum is compared, and damaged shards are taken out of the cache, so that they are missing;
            else only names and sizes are, and damage is an error. Holes are none.

    Returns:
        What was looked at; nothing where something was taken out.

    Raises:
        CacheError: damage, with its shards and samples; a StoreUnreachableError where something cannot be read, or no
            shard is there at all: nothing is taken out then.
        RemoteRankError: the first rank found damage.
    """

    def look() -> Committed:
        done = [shard for shard in committed_shards(cache) if shard in shards]
        if not done:
            require_shards(cache)  # what this part writes belongs beside the shards of others
            return Committed()
        level: Level = "crc" if repair else "inventory"
        report = verify(cache, level, shards=done, workers=None, show_progress=show_progress)
        if report.unreadable_shards:
            raise StoreUnreachableError(
                f"{cache.location}: {shards_in_words(report.unreadable_shards)} not readable, which is no damage: "
                f"{report.problems[0]}; nothing was removed"
            )
        damaged = report.damaged_shards
        if not damaged:
            return Committed(frozenset(done), report.bytes + report.record_bytes, report.tokens)
        if not repair:
            raise CacheError(_damage(cache, damaged))
        require_shards(cache)  # a disk may go while its checksums are read
        # Another job may have repaired a shard meanwhile: what it committed is not what was found damaged.
        for shard, attempt in zip(damaged, report.damaged_attempts, strict=True):
            discard_shard(cache, shard, attempt)
        return Committed()

    return first_rank_tells(f"checking {cache.location}", look)


def _damage(cache: Cache, damaged: list[int]) -> str:
    what, _, verb = shards_in_words(damaged).rpartition(" ")
    return (
        f"{cache.location}: {what} (samples {samples_of(cache, damaged)}) {verb} damaged; `megatron-kd "
        f"cache verify {cache.location}` says how. Run the capture again with --repair, which captures damaged shards "
        "anew"
    )
