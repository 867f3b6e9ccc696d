"""Checks a cache as thoroughly as asked for; each level includes the ones before it.

inventory   holes, records, files and their sizes, leftovers of crashed writers
structure   zarr metadata and index of every array, no chunk absent or outside its file, bounds of the rows
crc         crc32c of every inner chunk, xxh3_128 of every file
deep        every row decoded: both hashes, and all that writing refuses, at every position
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xxhash

from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.cache.array_writer import ABSENT
from megatron_kd.cache.commits import CommitRecord, object_names, read_commit
from megatron_kd.cache.mass import check_mass
from megatron_kd.cache.rank_table import IdCoding, check_rank_table
from megatron_kd.cache.row import check_row, content_hash
from megatron_kd.cache.schema import ArraySpec, parse_array
from megatron_kd.cache.shard_reader import ShardReader
from megatron_kd.cache.store import Cache, committed_shards, missing_shards, open_cache, ranges
from megatron_kd.cache.writer import group_attributes, orphans
from megatron_kd.errors import CacheError
from megatron_kd.progress import progress

Level = Literal["inventory", "structure", "crc", "deep"]
LEVELS: tuple[Level, ...] = get_args(Level)
_READ_BYTES = 1 << 24


@dataclass
class VerifyReport:
    """What ``verify`` found. ``ok`` says whether every row is there and passed.

    Attributes:
        level: as asked for.
        problems: one line each: what is wrong and where; holes included.
        damaged_shards: committed shards with a problem, ascending; to be captured anew.
        shards_expected, shards_committed, rows_expected, rows_committed, tokens: counts.
        bytes: of the files that committed shards consist of.
        orphans: attempts and temporary files that no record names. They take space and harm nothing; those of a
            capture that is running now are among them.
    """

    level: str
    problems: list[str] = field(default_factory=list)
    damaged_shards: list[int] = field(default_factory=list)
    shards_expected: int = 0
    shards_committed: int = 0
    rows_expected: int = 0
    rows_committed: int = 0
    tokens: int = 0
    bytes: int = 0
    orphans: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON values, ``ok`` included."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def verify(path: Path | str | Cache, level: Level = "structure", *, show_progress: bool = False) -> VerifyReport:
    """Checks all committed shards and goes on after a problem, so that one run finds all damaged shards.

    Raises:
        CacheError: where there is no cache, or its manifest or rank table is damaged: nothing can be judged then.
        ValueError: for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level!r} must be one of {', '.join(LEVELS)}")
    cache = open_cache(path)
    check_rank_table(cache.rank_table, cache.manifest.vocab_size)
    manifest = cache.manifest
    report = VerifyReport(level, shards_expected=manifest.shards, rows_expected=manifest.rows)
    missing = missing_shards(cache)
    if missing:
        samples = ranges(sample for shard in missing for sample in manifest.shard_samples(shard))
        report.problems.append(f"samples {samples} are missing: shards {ranges(missing)} were never committed")
    committed = committed_shards(cache)
    beyond = [shard for shard in committed if shard >= manifest.shards]
    if beyond:
        report.problems.append(f"commit records of shards {ranges(beyond)}, but the cache has {manifest.shards} shards")
    named: dict[str, int] = {}
    coding = IdCoding(cache.rank_table)
    with progress(f"verify {level}", len(committed), unit="shards", enabled=show_progress) as advance:
        for shard in committed:
            if shard < manifest.shards:
                before = len(report.problems)
                record = _collect(report, read_commit, cache, shard)
                if record is not None:
                    _verify_shard(cache, coding, record, LEVELS.index(level), report)
                    if record.attempt in named:
                        report.problems.append(f"shards {named[record.attempt]} and {shard} name one directory")
                    named[record.attempt] = shard
                if len(report.problems) > before:
                    report.damaged_shards.append(shard)
            advance(1)
    report.orphans = [str(orphan.relative_to(cache.path)) for orphan in _collect(report, orphans, cache) or []]
    return report


def _collect[**P, T](report: VerifyReport, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Runs a check; a CacheError or what the system refuses becomes a problem of the report."""
    try:
        return check(*args, **kwargs)
    except (CacheError, OSError) as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))
        return None


def _verify_shard(cache: Cache, coding: IdCoding, record: CommitRecord, depth: int, report: VerifyReport) -> None:
    before = len(report.problems)
    folder = cache.shards_folder / record.attempt
    report.shards_committed += 1
    report.rows_committed += record.rows
    report.tokens += record.tokens
    report.bytes += record.stored_bytes
    _collect(report, _check_inventory, cache, folder, record)
    if depth >= LEVELS.index("structure") and len(report.problems) == before:
        _collect(report, _check_group, cache, folder, record)
        for spec in cache.manifest.arrays.values():
            _collect(report, _check_structure, folder, spec)
        _collect(report, ShardReader, cache, coding, record.shard_index)
    if depth >= LEVELS.index("crc") and len(report.problems) == before:
        for name in sorted(object_names(cache)):
            _collect(report, _check_object, folder, name, record)
        for name in cache.manifest.arrays:
            array = ArrayReader(folder / name)
            for chunk in range(array.chunks):
                _collect(report, array.check_chunk, chunk)
    if depth >= LEVELS.index("deep") and len(report.problems) == before:
        shard = ShardReader(cache, coding, record.shard_index)
        for row in range(record.rows):
            _collect(report, _check_content, cache, shard, row)


def _check_inventory(cache: Cache, folder: Path, record: CommitRecord) -> None:
    found = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    for name, entry in record.objects.items():
        if found.get(name) != entry["bytes"]:
            size = f"{found[name]} bytes" if name in found else "nothing"
            raise CacheError(f"{folder / name}: the commit record has {entry['bytes']} bytes, the disk {size}")
    extra = sorted(found.keys() - record.objects.keys())
    if extra:
        raise CacheError(f"{folder} holds files that its commit record does not name: {', '.join(extra[:5])}")


def _check_group(cache: Cache, folder: Path, record: CommitRecord) -> None:
    try:
        attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{folder / 'zarr.json'} is not the metadata of a zarr group: {error}") from error
    if attributes != group_attributes(cache, record.shard_index):
        raise CacheError(f"{folder / 'zarr.json'} has other attributes than cache.json: {attributes}")


def _check_structure(folder: Path, spec: ArraySpec) -> None:
    array = ArrayReader(folder / spec.name)
    stored = json.loads((folder / spec.name / "zarr.json").read_bytes())
    # ArrayReader reads more than we write, so the metadata is compared as a whole.
    if stored != spec.metadata(array.length):
        wanted = parse_array(spec.metadata(array.length), spec.name).spec
        raise CacheError(f"{folder / spec.name / 'zarr.json'} describes {array.spec}, cache.json needs {wanted}")
    extents = array.extents()
    absent = np.flatnonzero((extents == ABSENT).any(-1))
    if len(absent):
        raise CacheError(f"{array.path}: inner chunks {ranges(absent.tolist())} were never written")
    ends = extents.sum(-1)
    # Our writer leaves no gap: chunks follow each other from 0 to the index.
    if extents[0, 0] != 0 or (extents[1:, 0] != ends[:-1]).any() or ends[-1] != array.size - array.index_bytes:
        raise CacheError(f"{array.path}: inner chunks do not follow each other from the start of the file to the index")


def _check_object(folder: Path, name: str, record: CommitRecord) -> None:
    state = xxhash.xxh3_128()
    with open(folder / name, "rb") as file:
        while data := file.read(_READ_BYTES):
            state.update(data)
    if state.hexdigest() != record.objects[name]["xxh3_128"]:
        raise CacheError(f"{folder / name} is damaged: its xxh3_128 is not the one in the commit record")


def _check_content(cache: Cache, shard: ShardReader, row: int) -> None:
    manifest = cache.manifest
    sample = manifest.shard_samples(shard.record.shard_index)[row]
    try:
        decoded = shard.row(row, 0, shard.length(row))
    except CacheError as error:
        raise CacheError(f"sample {sample}: {error}") from error
    if content_hash(decoded, manifest.value_dtype) != shard.record.content_hashes[row]:
        raise CacheError(f"sample {sample} in {shard.folder} does not decode to what was committed")
    check_row(
        decoded,
        vocab_size=manifest.vocab_size,
        top_k=manifest.top_k,
        extra_temperatures=len(manifest.temperatures) - 1,
    )
    check_mass(decoded, manifest.temperatures, manifest.value_dtype)
