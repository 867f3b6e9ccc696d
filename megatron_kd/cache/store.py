"""Where the files of a cache lie, and how it comes into being.

cache.json                       the manifest, create-only
rank_table-<hash>.u32            u32 [V], little-endian, create-only, there before cache.json names it
shards/000123-<attempt>/         one attempt at a shard: a zarr v3 group of sharded arrays
commits/000123.json              makes one attempt the shard, create-only
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.manifest import CacheManifest, first_differing_field
from megatron_kd.cache.rank_table import check_rank_table, rank_table_hash
from megatron_kd.cache.storage import LocalStorage, Storage, open_storage
from megatron_kd.errors import CacheError

_RANK_TABLE = re.compile(r"rank_table-[0-9a-f]{32}\.u32")
_COMMIT_NAME = re.compile(r"([0-9]{6,9})\.json")
MANIFEST_NAME = "cache.json"
MAX_MANIFEST_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class Cache:
    """An existing cache: where it is, its manifest, its rank table u32 [V]."""

    storage: Storage
    manifest: CacheManifest
    rank_table: np.ndarray

    @property
    def location(self) -> str:
        """The path or the URL, as it was given."""
        return self.storage.location

    def commit_name(self, shard_index: int) -> str:
        """The commit record of a shard, relative to the cache."""
        return f"commits/{_commit_file(shard_index)}"

    def shard_storage(self, attempt: str) -> Storage:
        """The files of an attempt."""
        return self.storage.below(f"shards/{attempt}")


def require_folder(storage: Storage) -> None:
    """Raises CacheError where a file stands in the place of a cache's folder, or of one above it."""
    if isinstance(storage, LocalStorage):
        for part in (storage.path, *storage.path.parents):
            if part.is_file():
                raise CacheError(f"{part} is a file, a cache is a folder: name another path")


def how_to_go_on(cache: Cache) -> str:
    """What a user does about shards that are missing."""
    command = "megatron-kd cache import" if cache.manifest.imported else "megatron-kd capture"
    return f"run `{command}` again, it resumes with what is missing"


def how_to_mend(cache: Cache) -> str:
    """What a user does about shards that are damaged. Of no use where a disk or a store did not answer."""
    if cache.manifest.imported:
        mends = "remove the commit records of damaged shards and run `megatron-kd cache import` again"
    else:
        mends = "`megatron-kd capture --repair` captures it again"
    return f"`megatron-kd cache verify {cache.location}` lists all damage, {mends}"


@contextmanager
def reported(path: Path | str, doing: str) -> Iterator[None]:
    """Turns what the system refuses into a CacheError that says what was being done, and what remains."""
    try:
        yield
    except OSError as error:
        what = {
            errno.ENOSPC: "the disk is full: free space",
            errno.EDQUOT: "the quota is used up: free space",
            errno.EFBIG: "the file would be too large: raise the limit (ulimit -f) or lower rows_per_shard",
            errno.EROFS: "the file system is read-only: choose another path",
            errno.EMFILE: "raise the limit of open files (ulimit -n)",
            errno.EACCES: "no permission: choose another path or change its mode",
        }.get(error.errno or 0, "see the system's message")
        raise CacheError(
            f"{doing} {path} failed ({error.strerror or error}); {what}, then run the command again. "
            "Shards already committed stay valid."
        ) from error


def create_cache(path: Path | str, manifest: CacheManifest, rank_table: np.ndarray) -> Cache:
    """Creates a cache, or opens the one that is there if it is the same; any number of processes may race.

    The numbering of the ids is that of whoever comes first: any table decodes exactly, so a cache with another one is
    opened with its own.

    Args:
        rank_table: u32 [V], from ``build_rank_table``; its hash must be the manifest's.

    Raises:
        CacheError: where another cache stands at ``path`` (named by the first field that differs), for a table that
            does not fit, or when the disk refuses.
    """
    storage = open_storage(path)
    check_rank_table(rank_table, manifest.vocab_size)
    if rank_table_hash(rank_table) != manifest.rank_table_hash:
        raise CacheError(
            f"the rank table has hash {rank_table_hash(rank_table)}, the manifest names {manifest.rank_table_hash}"
        )
    with reported(storage.location, "creating cache"):
        if not storage.exists(MANIFEST_NAME):
            storage.prepare("shards", "commits")
            storage.create(rank_table_name(manifest), np.ascontiguousarray(rank_table, "<u4").tobytes())
            storage.create(MANIFEST_NAME, manifest.to_json().encode())
    return open_same_cache(path, manifest)


def open_same_cache(path: Path | str, manifest: CacheManifest) -> Cache:
    """Opens the cache at ``path`` if it is that of ``manifest``, whatever its rank table.

    Raises:
        CacheError: for no cache, a damaged one, or another one (named by the first field that differs).
    """
    cache = open_cache(path)
    there, wanted = (_without_numbering(m.identity()) for m in (cache.manifest, manifest))
    difference = first_differing_field(there, wanted)
    if difference:
        name, found, needed = difference
        raise CacheError(
            f"{path} holds another cache: {name} there: {found!r}, needed by this run: {needed!r}. "
            "Choose another path, or remove that cache if nothing needs it."
        )
    return cache


def _without_numbering(identity: dict[str, Any]) -> dict[str, Any]:
    """What two captures of one cache must agree on, that which tells a reader most first."""
    keys = [key for key in identity if key != "rank_table_hash"]
    return {key: identity[key] for key in ("corpus", "tokenizer", "teacher", *keys)}


def open_cache(path: Path | str | Cache) -> Cache:
    """Reads manifest and rank table. Raises CacheError where there is no cache or one of the two is damaged."""
    if isinstance(path, Cache):
        return path
    storage = open_storage(path)
    where = storage.where(MANIFEST_NAME)
    try:
        require_folder(storage)
        manifest = CacheManifest.from_json(storage.read(MANIFEST_NAME, MAX_MANIFEST_BYTES), where)
    except FileNotFoundError as error:
        raise CacheError(
            f"{storage.location} is not a cache: it has no cache.json; make one with `megatron-kd capture`"
        ) from error
    except OSError as error:
        raise CacheError(f"{where} cannot be read: {error.strerror}") from error
    where = storage.where(rank_table_name(manifest))
    try:
        stored = storage.read(rank_table_name(manifest), 4 * manifest.vocab_size)
    except OSError as error:
        raise CacheError(f"{where} cannot be read: {error.strerror}; without it ids cannot be decoded") from error
    if len(stored) != 4 * manifest.vocab_size or rank_table_hash(np.frombuffer(stored, "<u4")) != (
        manifest.rank_table_hash
    ):
        raise CacheError(f"{where} is damaged: it does not have the hash in its name")
    table = np.frombuffer(stored, "<u4")
    try:
        check_rank_table(table, manifest.vocab_size)
    except CacheError as error:
        raise CacheError(f"{where} is damaged: {error}") from error
    return Cache(storage, manifest, table)


def rank_table_name(manifest: CacheManifest) -> str:
    """The file of the rank table that a cache uses, relative to the cache."""
    return f"rank_table-{manifest.rank_table_hash}.u32"


def is_rank_table(name: str) -> bool:
    """Whether a file of this name, relative to a cache, is a rank table, used or not."""
    return _RANK_TABLE.fullmatch(name) is not None


def committed_shards(path: Path | str | Cache) -> list[int]:
    """The shards that are done, ascending. Lists a directory, reads no shard.

    Raises:
        CacheError: where ``commits/`` cannot be read, or is missing although there are attempts: shards whose records
            are lost. Without either folder nothing was committed: a copy may leave out empty folders.
    """
    cache = open_cache(path)
    try:
        names = cache.storage.below("commits").names()
    except FileNotFoundError as error:
        attempts = _attempts(cache)
        if not attempts:
            return []
        raise CacheError(
            f"{cache.storage.where('commits')} is missing although shards/ holds {attempts} attempts at shards, which "
            "are worth nothing without their commit records: bring it back (is its disk mounted, was it copied?), or "
            "remove shards/ too to begin anew"
        ) from error
    except OSError as error:
        raise CacheError(f"{cache.storage.where('commits')} cannot be read: {error.strerror}") from error
    shards = {name: int(match[1]) for name in names if (match := _COMMIT_NAME.fullmatch(name))}
    return sorted(shard for name, shard in shards.items() if name == _commit_file(shard))


def stray_records(cache: Cache) -> list[str]:
    """Records of shards that this cache cannot have, by names relative to it: another cache was mixed into it."""
    try:
        names = cache.storage.below("commits").names()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(f"{cache.storage.where('commits')} cannot be read: {error.strerror}") from error
    own = {_commit_file(shard) for shard in committed_of(cache)}
    return [f"commits/{name}" for name in names if _COMMIT_NAME.fullmatch(name) and name not in own]


def _commit_file(shard_index: int) -> str:
    return f"{shard_index:06d}.json"


def _attempts(cache: Cache) -> int:
    try:
        return sum(not name.startswith(".") for name in cache.storage.below("shards").names())
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise CacheError(f"{cache.storage.where('shards')} cannot be read: {error.strerror}") from error


def committed_of(cache: Cache) -> list[int]:
    """The committed shards that the cache can have, ascending; records of others are strays."""
    return [shard for shard in committed_shards(cache) if shard < cache.manifest.shards]


def missing_shards(path: Path | str | Cache) -> list[int]:
    """The shards still to be written, ascending."""
    cache = open_cache(path)
    done = set(committed_shards(cache))
    return [shard for shard in range(cache.manifest.shards) if shard not in done]


def missing_samples(cache: Cache) -> str:
    """The sample ids of all missing shards in words, such as ``0–9, 40–44``; empty for a complete cache."""
    return samples_of(cache, missing_shards(cache))


def samples_of(cache: Cache, shards: Iterable[int]) -> str:
    """The sample ids of ascending shards in words, without counting them one by one."""
    return _in_words([(samples[0], samples[-1]) for samples in map(cache.manifest.shard_samples, shards)])


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Ascending numbers as ranges, at most ``most`` of them: 0, 1, 2, 7 → ``0–2, 7``."""
    return _in_words(((number, number) for number in numbers), most)


def shards_in_words(shards: Collection[int]) -> str:
    """Ascending shards with their verb: ``shard 7 is``, ``shards 1, 4–6 are``."""
    return f"shards {ranges(shards)} are" if len(shards) > 1 else f"shard {ranges(shards)} is"


def _in_words(spans: Iterable[tuple[int, int]], most: int = 8) -> str:
    """Ascending spans, last number included; neighbours become one."""
    found: list[list[int]] = []
    for first, last in spans:
        if found and first == found[-1][1] + 1:
            found[-1][1] = last
        else:
            found.append([first, last])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in found[:most]]
    return ", ".join(words) + (f" and {len(found) - most} more ranges" if len(found) > most else "")


def cache_exists(path: Path | str) -> bool:
    """Whether a cache stands there, sound or not. Raises CacheError where no folder can be."""
    storage = open_storage(path)
    require_folder(storage)
    with reported(storage.location, "looking for the cache"):
        return storage.exists(MANIFEST_NAME)
