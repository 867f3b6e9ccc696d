"""Where the files of a cache lie: a local disk, or an object store named by a URL. Both by one small interface.

Names are relative to the storage and have ``/`` between their parts. What the system or the store refuses is an
``OSError``; a file that is not there is ``FileNotFoundError`` in both. A store that does not answer, or fails after all
retries, is a ``StoreUnreachableError``.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.errors import CacheError, StoreUnreachableError
from megatron_kd.files import create_only, fsync_directory

NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What a file is missing by. Any other OSError tells of the disk or the rights of the reader, not of the cache."""
_OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP, errno.ENOENT)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_NEARLY_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


@dataclass(frozen=True)
class StoredObject:
    """A file of a storage: its name, its size in bytes, when it was written (seconds since 1970)."""

    name: str
    size: int
    modified: float


def concerns_one_file(error: BaseException) -> bool:
    """Whether what could not be read may be all that cannot: rights, a bad block, a link that leads nowhere.

    A store that does not answer, or a process that may open no more files, will not do better with the next one.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.errno in _OF_ONE_FILE
        cause = cause.__cause__
    return False


class StoredFile(ABC):
    """A file open for reading. Safe in threads."""

    where: str
    size: int
    close: Callable[[], object]

    @abstractmethod
    def read(self, extents: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes [begin, end) of each extent, none of them empty. Raises CacheError where the file ends before."""


class Storage(ABC):
    """A folder of files. ``location`` is how the user names it: a path or a URL."""

    location: str

    def where(self, name: str) -> str:
        """The full name of a file or folder, for messages."""
        return f"{self.location}/{name}" if name else self.location

    @abstractmethod
    def below(self, name: str) -> Storage:
        """The folder ``name`` as a storage of its own."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a file of this name is there. Raises OSError where the system does not tell."""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """A whole file. Raises CacheError for one of more than ``limit`` bytes, before it is read."""

    @abstractmethod
    def open(self, name: str, size: int | None = None) -> StoredFile:
        """A file to read parts of.

        Args:
            size: what is on record for it, in bytes. An object store is then not asked for it. A file of another size
                is refused with a CacheError, here or by its first read.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the files and folders directly in it, sorted."""

    @abstractmethod
    def files(self) -> list[StoredObject]:
        """All files in it and in the folders below, sorted by name."""

    @abstractmethod
    def total_bytes(self, name: str) -> int:
        """The size of a file, or of all files in a folder; 0 where nothing is there."""

    @abstractmethod
    def last_written(self, name: str) -> float | None:
        """When a file, or anything in a folder, was written last: seconds since 1970; None where nothing is there."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Publishes a file unless one of that name exists.

        Returns:
            Whether a file with these bytes stands there: an answer may be lost and the request sent again, which then
            finds its own file. Of many racing callers with different data exactly one gets True.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it. No error where it is gone already."""

    def remove_if(self, name: str, is_it: Callable[[str], bool]) -> bool:
        """Removes a file if it is the one that is meant; returns whether it did.

        In an object store, which has no such thing, a file that takes its place between the look and the removal is
        removed in its stead. On a disk none is.

        Args:
            is_it: looks at the file under a name. Also called for a name where none is.
        """
        if not is_it(name):
            return False
        self.remove(name)
        return True

    @abstractmethod
    def prepare(self, *folders: str) -> None:
        """Makes the storage and folders in it."""

    @abstractmethod
    def staging(self, name: str) -> Path:
        """A new local folder to write the files of the folder ``name`` to, for ``publish`` or ``discard``."""

    @abstractmethod
    def publish(self, staged: Path, name: str, files: Iterable[str]) -> None:
        """Makes the files of a staged folder durable as folder ``name``. They were synced one by one.

        Args:
            files: all of them, by their names in the folder.

        Raises:
            CacheError: one is not there.
        """

    @abstractmethod
    def discard(self, staged: Path, name: str) -> None:
        """Removes a staged folder and what was published of it, as far as possible."""

    @abstractmethod
    def published(self, staged: Path) -> None:
        """Removes what staging no longer needs, once its folder is committed or given up; nothing published."""

    def together[T](self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Does calls that each read from the storage; at the same time, where each costs a round trip."""
        return [call() for call in calls]


def is_url(location: Path | str) -> bool:
    """Whether a location names an object store; everything else is a path."""
    return isinstance(location, str) and _URL.match(location) is not None


def open_storage(location: Path | str | Storage) -> Storage:
    """The storage at a path or URL; nothing is looked at yet.

    Raises:
        CacheError: for a URL, where the package for object stores is missing or the URL is of an unknown kind; and for
            a path that was to be a URL.
    """
    if isinstance(location, Storage):
        return location
    text = str(location)  # a Path has lost one of two slashes
    if nearly := _NEARLY_URL.match(text):
        raise CacheError(
            f"{text} is no URL and hardly meant as a path: write {nearly[1]}://{text[nearly.end() :]} for an object "
            f"store, {Path.cwd() / text} for a folder"
        )
    if is_url(location):
        from megatron_kd.cache.storage_objects import ObjectStorage

        return ObjectStorage(str(location))
    return LocalStorage(Path(location))


class LocalStorage(Storage):
    """A folder of a local or network file system. Links in it are followed; only regular files are read."""

    def __init__(self, path: Path) -> None:
        """``path`` need not exist."""
        self.path = path
        self.location = str(path)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def below(self, name: str) -> LocalStorage:
        return LocalStorage(self.path / name)

    def exists(self, name: str) -> bool:
        # Not Path.exists, which from Python 3.14 on takes every refusal for a no: a shard would be captured again.
        try:
            with _links_followed(self.path / name):
                os.stat(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, name: str, limit: int) -> bytes:
        descriptor, size = _open(self.path / name)
        with os.fdopen(descriptor, "rb") as file:
            check_limit(self.where(name), size, limit)
            return file.read(size)  # memory is taken for what is asked for, so not for the limit

    def open(self, name: str, size: int | None = None) -> StoredFile:
        return _LocalFile(self.path / name, size)

    def names(self) -> list[str]:
        with _links_followed(self.path):
            return sorted(os.listdir(self.path))

    def files(self) -> list[StoredObject]:
        found, folders = [], [("", True)]
        while folders:
            folder, descend = folders.pop()
            with _links_followed(self.path / folder), os.scandir(self.path / folder) as entries:
                for entry in entries:
                    if not entry.is_dir():
                        with _links_followed(self.path / folder / entry.name):
                            status = entry.stat()
                        found.append(StoredObject(f"{folder}{entry.name}", status.st_size, status.st_mtime))
                    elif descend:
                        # Of a linked folder the files and no more: a link may lead round in a circle, or to the root.
                        folders.append((f"{folder}{entry.name}/", not entry.is_symlink()))
        return sorted(found, key=lambda file: file.name)

    def total_bytes(self, name: str) -> int:
        path, total = self.path / name, 0
        for entry in (path, *path.rglob("*")):
            with suppress(FileNotFoundError):
                status = entry.lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
        return total

    def last_written(self, name: str) -> float | None:
        path = self.path / name
        try:
            return max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        return create_only(self.path / name, data)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        fsync_directory(path.parent)

    def remove_if(self, name: str, is_it: Callable[[str], bool]) -> bool:
        if not is_it(name):
            return False
        path = self.path / name
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            os.rename(path, aside)  # from here on nobody can exchange it
        except FileNotFoundError:
            return False
        wanted = is_it(aside.relative_to(self.path).as_posix())
        if not wanted:
            with suppress(FileExistsError):  # a third one has come meanwhile: one is as good as the other
                os.link(aside, path)
        aside.unlink()
        fsync_directory(path.parent)
        return wanted

    def prepare(self, *folders: str) -> None:
        for folder in ("", *folders):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        fsync_directory(self.path.parent)  # the other names are synced with the files that are published in them

    def staging(self, name: str) -> Path:
        path = self.path / name
        path.mkdir()
        return path

    def publish(self, staged: Path, name: str, files: Iterable[str]) -> None:
        check_staged(staged, files)
        for folder in sorted(path for path in staged.iterdir() if path.is_dir()):
            fsync_directory(folder)
        fsync_directory(staged)
        fsync_directory(staged.parent)

    def discard(self, staged: Path, name: str) -> None:
        shutil.rmtree(staged, ignore_errors=True)

    def published(self, staged: Path) -> None:
        pass  # it was written where it stays


class _LocalFile(StoredFile):
    """Positional reads share no state, so forked processes may go on with an open one."""

    def __init__(self, path: Path, size: int | None) -> None:
        self.where = str(path)
        self._descriptor, self.size = _open(path)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        check_size(self.where, self.size, size)

    def read(self, extents: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._pread(end - begin, begin) for begin, end in extents]

    def _pread(self, size: int, offset: int) -> bytes:
        parts = []
        while size:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                raise CacheError(f"{self.where} is truncated: {size} bytes from offset {offset} on are missing")
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def check_limit(where: str, size: int, limit: int) -> None:
    """Raises CacheError for a file that is larger than any of its kind."""
    if size > limit:
        raise CacheError(f"{where} has {size} bytes, more than the {limit} that such a file may have")


def check_staged(folder: Path, files: Iterable[str]) -> None:
    """Raises CacheError where a file that was written is gone: a commit record must not name it."""
    for name in sorted(files):
        if not (folder / name).is_file():
            raise CacheError(
                f"{folder / name} is gone: another program removes what is written there; choose another folder"
            )


def check_size(where: str, size: int, recorded: int | None) -> None:
    """Raises CacheError for a file of another size than is on record for it, if one is."""
    if recorded is not None and size != recorded:
        raise CacheError(f"{where} has {size} bytes, its commit record says {recorded}")


@contextmanager
def _links_followed(path: Path) -> Iterator[None]:
    """What is missing because a link on the way leads nowhere is out of reach: its disk may not be mounted."""
    try:
        yield
    except FileNotFoundError as error:
        for part in (path, *path.parents):
            if part.is_symlink() and not os.path.exists(part):
                what = "" if part == path else f"{path} cannot be read: "
                raise StoreUnreachableError(
                    f"{what}{part} is a link to {os.readlink(part)}, which is not there: is its disk mounted? If what "
                    "it held is lost, remove the link"
                ) from error
        raise


def _open(path: Path) -> tuple[int, int]:
    """A descriptor and the size of a regular file; a pipe or a device could block, or never end."""
    with _links_followed(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CacheError(f"{path} is not a file")
    return descriptor, status.st_size
