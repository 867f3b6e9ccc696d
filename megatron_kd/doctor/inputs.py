"""What a recipe reads: tokenizer, samples, cache, checkpoints. ``train`` refuses for the same reasons.

Every check reads names, sizes, manifests and a few rows; whole checksums are ``cache verify``'s.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megatron_kd.cache.storage import is_url, open_storage
from megatron_kd.cache.store import MANIFEST_NAME, cache_exists
from megatron_kd.config import ModelConfig, Recipe
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.data.steps import train_rows
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.doctor.check import Check, fail, not_needed, ok, warn
from megatron_kd.errors import DataError, KDError
from megatron_kd.models.checkpoint import check_same_architecture, read_note
from megatron_kd.models.checkpoint_files import check_files
from megatron_kd.models.convert import tokenizer_source
from megatron_kd.teacher.capture_cache import check_samples, check_tokenizer
from megatron_kd.training.session import open_cached_targets

_ROWS = 4


def check_samples_of(recipe: Recipe, name: str) -> Check:
    """Opens the samples and reads some of their rows.

    Args:
        name: of the recipe's file, for the command that makes them.
    """
    try:
        samples = open_samples(recipe.data.samples)
        check_samples(recipe, samples)
        rows = train_rows(samples, recipe.data.train_tokens)
        step = max(1, len(rows) // _ROWS)
        samples.rows(rows[::step][:_ROWS])
    except DataError as error:
        return fail("samples", str(error), f"megatron-kd prepare {name}, or correct data.samples")
    splits = ", ".join(f"{len(ids)} {split}" for split, ids in samples.splits.items())
    return ok("samples", f"{samples.path}: {splits} rows of {samples.seq_length} tokens")


def check_tokenizer_of(recipe: Recipe) -> Check:
    """Loads the tokenizer and compares it with the one that made the samples."""
    samples = samples_of(recipe)
    try:
        if samples is not None and recipe.data.tokenizer is None:
            check_tokenizer(recipe, samples)
        source = tokenizer_source(recipe)
        identity = load_tokenizer(source).identity()
    except KDError as error:
        if samples is not None and not isinstance(error, DataError):
            return warn("tokenizer", str(error), "training goes without: the samples are there")
        return fail("tokenizer", str(error), "correct data.tokenizer or teacher.model.hf")
    if samples is not None and identity["sha256"] != samples.tokenizer_identity.get("sha256"):
        theirs = samples.tokenizer_identity
        return fail(
            "tokenizer",
            f"{source} is another one than {theirs.get('name')} ({theirs.get('vocab_size')} tokens), which made "
            f"{samples.path}",
            "correct data.tokenizer, or prepare into another data.samples",
        )
    return ok("tokenizer", f"{identity['name']}, {identity['vocab_size']} tokens")


def check_cache_of(recipe: Recipe, name: str) -> list[Check]:
    """Opens the cache against the samples, as a run does."""
    location = recipe.teacher.cache
    online = recipe.teacher.mode == "online"
    if location is None:
        return [not_needed("cache", "teacher.mode is online")]
    checks = [_store(location)] if is_url(location) else []
    if checks and checks[0].status == "fail":
        return checks
    if online and not cache_exists(location):
        return [*checks, not_needed("cache", "teacher.mode is online")]
    samples = samples_of(recipe)
    if samples is None:
        there = "there" if cache_exists(location) else "missing"
        return [
            *checks,
            fail("cache", f"{location} is {there}, its samples are missing", f"megatron-kd prepare {name}"),
        ]
    try:
        cached = open_cached_targets(recipe, samples, (0, 1))
        rows = train_rows(samples, recipe.data.train_tokens)
        cached.targets(rows[:: max(1, len(rows) // _ROWS)][:_ROWS])
    except KDError as error:
        return [*checks, fail("cache", str(error), f"megatron-kd capture {name}, or correct teacher.cache")]
    return [*checks, ok("cache", f"{location}: top {cached.top_k} of {len(samples)} rows, fits the recipe")]


def _store(location: str) -> Check:
    start = time.perf_counter()
    try:
        storage = open_storage(location)
        there = storage.exists(MANIFEST_NAME)
        if not there:
            storage.names()  # only this tells a bucket that is not there from one that is empty
    except (KDError, OSError) as error:
        return fail("object-store", str(error), "check endpoint, region and credentials in the environment (AWS_…)")
    seconds = time.perf_counter() - start
    return ok("object-store", f"{location} answers in {seconds * 1e3:.0f} ms{'' if there else ', no cache there yet'}")


def check_checkpoints_of(recipe: Recipe, name: str) -> Iterator[Check]:
    """The checkpoints that the recipe's training reads: of an online teacher, of a cut one, of the student."""
    teacher, student = recipe.teacher, recipe.student
    if teacher.mode == "online" or student.from_teacher is not None:
        yield _checkpoint("teacher", teacher.checkpoint, teacher.model, name)
    else:
        yield not_needed("teacher-checkpoint", "training reads the cache")
    if student.checkpoint is not None:
        yield _checkpoint("student", student.checkpoint, student.model, name)
    else:
        begins = "from the teacher" if student.from_teacher is not None else "with random weights"
        yield not_needed("student-checkpoint", f"the student begins {begins}")


def _checkpoint(role: str, path: str | None, model: ModelConfig, name: str) -> Check:
    check = f"{role}-checkpoint"
    if path is None:
        return fail(check, f"{role}.checkpoint is not set", f"set it, then megatron-kd convert import {name}")
    folder = Path(path)
    try:
        note = read_note(folder)
        check_same_architecture(folder, note, model)
        check_files(folder, note.get("files", {}))
    except KDError as error:
        source = "" if model.hf is not None else f" {role}.model.hf=FOLDER"
        todo = f"megatron-kd convert import {name} --role {role}{source}, or correct {role}.checkpoint"
        return fail(check, str(error), todo)
    return ok(check, f"{folder}: {model.name}")


def samples_of(recipe: Recipe) -> SampleSet | None:
    """The samples, None where they cannot be opened."""
    try:
        return open_samples(recipe.data.samples)
    except DataError:
        return None


def visible_paths(recipe: Recipe) -> list[str]:
    """Those of the recipe's paths that this node sees."""
    paths = [recipe.data.samples, recipe.teacher.cache, recipe.teacher.checkpoint, recipe.student.checkpoint]
    return [path for path in paths if path is not None and not is_url(path) and Path(path).exists()]


def check_mounts(seen_by_node: Mapping[str, Collection[str]]) -> list[Check]:
    """Judges what several nodes see of the same recipe: a path that only some see is not mounted on the others."""
    everything = list(dict.fromkeys(path for seen in seen_by_node.values() for path in seen))
    checks = []
    for node, seen in seen_by_node.items():
        missing = [path for path in everything if path not in seen]
        if missing:
            todo = "other nodes see it: mount the same file systems here"
            checks.append(fail("shared-paths", f"{', '.join(missing)} not seen", todo).on(node))
        else:
            checks.append(ok("shared-paths", f"{len(everything)} paths of the recipe are seen").on(node))
    return checks
