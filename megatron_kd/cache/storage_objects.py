"""Object stores (S3, Google Cloud Storage, Azure) by the library obstore.

The library works in threads of its own, which a fork does not copy: a process that was forked from one that used it
would wait for them for ever. Here it gets an error instead. A call of it hears no Ctrl-C and may take minutes where a
store does not answer: calls are made in threads that nobody has to wait for.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from megatron_kd.cache.local_staging import make_staging, remove_staging
from megatron_kd.cache.storage import Storage, StoredFile, StoredObject, check_limit, check_size, check_staged
from megatron_kd.daemons import DaemonThreads
from megatron_kd.errors import CacheError, StoreUnreachableError

_PARALLEL = 16
_COALESCE = 256 * 1024  # bytes of a gap that are sooner read than skipped: a round trip is worth more
_NO_SUCH_RANGE = "416 Range Not Satisfiable"  # the server's answer where the object ends before; no error class has it
_NO_SUCH_BUCKET = ("<Code>NoSuchBucket<", "<Code>ContainerNotFound<")  # likewise; of Google's store as of S3

_lock = threading.Lock()
_used_by: int | None = None  # the process in which the library runs
_threads: DaemonThreads | None = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # one that was held at the fork would never be released


os.register_at_fork(after_in_child=_renew_lock)


def _library(url: str) -> Any:
    """The module obstore. Raises CacheError where it is not installed, or cannot work after a fork."""
    global _used_by, _threads
    try:
        import obstore
    except ImportError as error:
        raise CacheError(
            f"{url} is an object store, which needs one more package: pip install 'megatron-kd[object-store]'"
        ) from error
    with _lock:
        if _used_by is None:
            _used_by, _threads = os.getpid(), DaemonThreads(_PARALLEL, "object-store")
    if _used_by != os.getpid():
        raise CacheError(
            f"{url} cannot be used in a process that was forked from one that had used an object store: start "
            "processes by spawn or forkserver, or fork before the first use"
        )
    return obstore


def _call[**P, T](do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A call of the library, which ``_library`` has returned before."""
    assert _threads is not None
    return _threads.call(do, *args, **kwargs)


class ObjectStorage(Storage):
    """All objects whose names begin with the path of a URL, such as ``s3://bucket/path``.

    Endpoint, region and credentials come from the environment, as obstore reads it. May be pickled: the other process
    opens it again.
    """

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises CacheError without the package, or for a URL that it does not know."""
        self.location = url.rstrip("/")
        self._prefix = ""
        library = _library(url)
        from obstore.store import from_url

        try:
            self._store = from_url(self.location)
        except (library.exceptions.BaseError, ValueError) as error:
            raise CacheError(f"{self.location} cannot be opened: {_first_line(error)}") from error

    def __reduce__(self) -> tuple[Callable[[str], ObjectStorage], tuple[str]]:
        return ObjectStorage, (self.location,)

    def __copy__(self) -> ObjectStorage:
        other = object.__new__(ObjectStorage)
        other.__dict__.update(self.__dict__)
        return other

    @contextmanager
    def _translated(self, library: Any, name: str) -> Iterator[None]:
        """Errors of the library as ours, which say which object it was. Retries were the library's."""
        where = self.where(name)
        try:
            yield
        except (FileNotFoundError, library.exceptions.GenericError) as error:
            if any(code in str(error) for code in _NO_SUCH_BUCKET):
                raise StoreUnreachableError(
                    f"{where} is in no such bucket: create the bucket or correct the URL"
                ) from error
            if not isinstance(error, FileNotFoundError):
                raise StoreUnreachableError(f"{where} cannot be reached: {_first_line(error)}") from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
        except (library.exceptions.PermissionDeniedError, library.exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _first_line(error), where) from error
        except library.exceptions.BaseError as error:
            raise OSError(errno.EIO, _first_line(error), where) from error

    def _full(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def _relative(self, path: str) -> str:
        return path[len(self._prefix) + 1 :] if self._prefix else path

    def below(self, name: str) -> ObjectStorage:
        folder = copy(self)  # of the same connections
        folder.location, folder._prefix = self.where(name), self._full(name)
        return folder

    def exists(self, name: str) -> bool:
        try:
            self._head(name)
        except FileNotFoundError:
            return False
        return True

    def _head(self, name: str) -> int:
        library, store = _library(self.location), self._store
        with self._translated(library, name):
            return int(_call(library.head, store, self._full(name))["size"])

    def read(self, name: str, limit: int) -> bytes:
        library, store = _library(self.location), self._store
        with self._translated(library, name):
            found = _call(library.get, store, self._full(name))
            check_limit(self.where(name), found.meta["size"], limit)
            return bytes(_call(found.bytes))

    def open(self, name: str, size: int | None = None) -> StoredFile:
        return _ObjectFile(self, name, self._head(name) if size is None else size)

    def read_range(self, name: str, begin: int, end: int, size: int) -> bytes:
        """The bytes [begin, end) by one request. Raises CacheError for an object that has not ``size`` bytes."""
        library, store = _library(self.location), self._store
        with self._translated(library, name):
            try:
                found = _call(library.get, store, self._full(name), options={"range": (begin, end)})
            except library.exceptions.GenericError as error:
                if _NO_SUCH_RANGE not in str(error):
                    raise
                raise CacheError(f"{self.where(name)} is truncated: it does not have {size} bytes") from error
            check_size(self.where(name), found.meta["size"], size)
            data = bytes(_call(found.bytes))
        if len(data) != end - begin:
            raise CacheError(f"{self.where(name)} is truncated: it has no bytes up to {end}")
        return data

    def names(self) -> list[str]:
        library, store = _library(self.location), self._store
        with self._translated(library, ""):
            found = _call(library.list_with_delimiter, store, self._prefix or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted(map(self._relative, paths))

    def files(self) -> list[StoredObject]:
        library, store = _library(self.location), self._store
        with self._translated(library, ""):
            found = [
                StoredObject(self._relative(entry["path"]), entry["size"], entry["last_modified"].timestamp())
                for entry in _call(_list, library, store, self._prefix or None)
            ]
        return sorted(found, key=lambda file: file.name)

    def total_bytes(self, name: str) -> int:
        return sum(file.size for file in self.below(name).files())

    def last_written(self, name: str) -> float | None:
        return max((file.modified for file in self.below(name).files()), default=None)

    def create(self, name: str, data: bytes) -> bool:
        library, store = _library(self.location), self._store
        with self._translated(library, name):
            try:
                _call(library.put, store, self._full(name), data, mode="create", use_multipart=False)
            except library.exceptions.AlreadyExistsError:
                # A put that succeeded and whose answer was lost is tried again, and then finds its own object.
                return _call(lambda: bytes(library.get(store, self._full(name)).bytes())) == data
        return True

    def remove(self, name: str) -> None:
        library, store = _library(self.location), self._store
        with self._translated(library, name):
            # A prefix is one of whole parts: neither "ab" nor "a.json" lies within "a".
            within = [entry["path"] for entry in _call(_list, library, store, self._full(name))]
            _call(library.delete, store, sorted({self._full(name), *within}))

    def prepare(self, *folders: str) -> None:
        pass  # folders are parts of names

    def staging(self, name: str) -> Path:
        return make_staging(name.rpartition("/")[2])

    def publish(self, staged: Path, name: str, files: Iterable[str]) -> None:
        library, store = _library(self.location), self._store
        files = sorted(files)
        check_staged(staged, files)
        for file in files:
            target = f"{name}/{file}"
            with self._translated(library, target):
                _call(library.put, store, self._full(target), staged / file)

    def discard(self, staged: Path, name: str) -> None:
        remove_staging(staged)
        try:
            self.remove(name)
        except (OSError, CacheError):
            return  # the store may be what failed; what is left there is an orphan

    def published(self, staged: Path) -> None:
        remove_staging(staged)

    def together[T](self, calls: Sequence[Callable[[], T]]) -> list[T]:
        _library(self.location)
        assert _threads is not None
        return _threads.map(calls)


class _ObjectFile(StoredFile):
    def __init__(self, storage: ObjectStorage, name: str, size: int) -> None:
        self._storage, self._name = storage, name
        self.where, self.size = storage.where(name), size
        self.close = lambda: None

    def read(self, extents: Sequence[tuple[int, int]]) -> list[bytes]:
        # Not by the library's own reading of many ranges: it ends the process where an object is shorter than it says.
        spans: list[tuple[int, int]] = []
        for begin, end in sorted(extents):
            if spans and begin - spans[-1][1] <= _COALESCE:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((begin, end))
        parts = [(begin, self._storage.read_range(self._name, begin, end, self.size)) for begin, end in spans]
        found = []
        for begin, end in extents:
            at, part = next((at, part) for at, part in reversed(parts) if at <= begin)
            found.append(part if len(part) == end - begin else part[begin - at : end - at])
        return found


def _list(library: Any, store: Any, prefix: str | None) -> list[Any]:
    """All objects below a prefix, which come by the thousand."""
    return [entry for part in library.list(store, prefix=prefix) for entry in part]


def _first_line(error: Exception) -> str:
    """What the library says, without the document that the server sent and the library's inner state."""
    return str(error).split("\n")[0].split(": <?xml")[0][:300]
