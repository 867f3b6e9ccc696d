"""Whether the two halves of a cache, its records and its shards, are both there.

They may lie on disks of their own. A disk that is not mounted looks like a cache whose every shard was deleted: taken
for that, a repair would throw away the records of a sound cache, and cleaning up the shards of one without records.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_kd.cache.commits import attempt_shard, read_commit
from megatron_kd.cache.storage import concerns_one_file
from megatron_kd.cache.store import Cache, committed_of, reported
from megatron_kd.errors import CacheError, StoreUnreachableError


def require_shards(cache: Cache, first: Collection[int] = ()) -> None:
    """Refuses a cache that has commit records and none of the shards they name. Reads one record of a sound one.

    Args:
        first: shards to look at before all others.

    Raises:
        StoreUnreachableError: ``shards/`` is missing, empty, or has nothing that a record names. Nothing may then be
            concluded from files that are not there.
        CacheError: ``commits/`` is missing and ``shards/`` has attempts.
    """
    committed = sorted(committed_of(cache), key=lambda shard: shard not in first)
    there: set[str] | None = None
    named = 0
    for shard in committed:
        try:
            attempt = read_commit(cache, shard).attempt
        except CacheError as error:
            _raise_unless_of_one_file(error)
            continue  # a damaged record names nothing; that is for those to say who look for damage
        named += 1
        if there is None:
            try:
                if cache.shard_storage(attempt).exists("zarr.json"):
                    return
            except (OSError, CacheError) as error:
                _raise_unless_of_one_file(error)
            there = _attempts(cache)
        if attempt in there:
            return
        if not any(attempt_shard(name) is not None for name in there):
            named = len(committed)
            break
    if named:
        raise StoreUnreachableError(_absent(cache, there or set(), named))


def make_folders(cache: Cache) -> None:
    """Makes ``commits/`` and ``shards/`` where they are missing: copying leaves out empty folders.

    Raises as ``require_shards``, and CacheError where the disk refuses.
    """
    require_shards(cache)
    with reported(cache.location, "creating the folders of"):
        missing = [folder for folder in ("shards", "commits") if not cache.storage.exists(folder)]
        if missing:
            cache.storage.prepare(*missing)


def _raise_unless_of_one_file(error: OSError | CacheError) -> None:
    if isinstance(error, OSError | StoreUnreachableError) and not concerns_one_file(error):
        raise StoreUnreachableError(f"the cache cannot be read: {error}") from error


def _attempts(cache: Cache) -> set[str]:
    try:
        return set(cache.storage.below("shards").names())
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StoreUnreachableError(f"{cache.storage.where('shards')} cannot be read: {error.strerror}") from error


def _absent(cache: Cache, there: set[str], records: int) -> str:
    folder, commits = cache.storage.where("shards"), cache.storage.where("commits")
    if there:
        what = "has none of the shards"
    else:
        what = "is empty" if cache.storage.exists("shards") else "is missing"
    exist = f"{records} commit records name some" if records > 1 else "a commit record names one"
    return (
        f"{folder} {what} although {exist}: is its disk mounted, was all of it copied? If the shards are lost, remove "
        f"{commits} too, and capture or import again to begin anew"
    )
