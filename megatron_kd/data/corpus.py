"""Documents from a corpus, one after another: the text is never held as a whole."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast, get_args

import xxhash

from megatron_kd.data.conversation import Conversation, checked_text, conversation_of
from megatron_kd.data.names import CorpusFormat
from megatron_kd.errors import DataError

_FOLDER_SUFFIXES = {"text": (".txt", ".md", ".rst"), "jsonl": (".jsonl",), "chat": (".jsonl",)}
# Files up to this size are hashed whole; of larger ones blocks are sampled, so that naming a corpus of terabytes
# does not mean reading it.
_WHOLE_FILE_BYTES = 256 * 2**20
_BLOCK_BYTES = 2**20
_BLOCKS = 64
_READ_ERRORS = (OSError, EOFError, zlib.error)


def read_documents(corpus_format: CorpusFormat, paths: Sequence[str] = (), text_key: str = "text") -> Iterator[str]:
    """The documents of a corpus, in an order that depends on nothing but the corpus.

    Args:
        corpus_format: ``pydoc_topics``, the English documentation inside every Python (``paths`` is not used);
            ``text``, one document a file; ``jsonl``, one object a line. Files ending in ``.gz`` are unpacked.
        paths: files, glob patterns (``**`` crosses folders) or folders; of a folder all files below it that end in
            .txt, .md or .rst (``text``) or .jsonl (``jsonl``), hidden ones left out.
        text_key: where the text of a JSON object of ``jsonl`` is.

    Raises:
        DataError: at the call for an unknown format or paths that match nothing; while reading for a file that is
            not UTF-8, and, naming file and line, for bad JSON, a missing key, or a text that is not a string.
    """
    if corpus_format == "pydoc_topics":
        return iter(_pydoc_topics())
    files = corpus_files(corpus_format, paths)
    if corpus_format == "text":
        return (_read_text(path) for path in files)
    return _read_jsonl(files, partial(_text_of, text_key))


def read_conversations(paths: Sequence[str]) -> Iterator[Conversation]:
    """The conversations of a ``chat`` corpus, one JSON object with ``messages`` a line; paths as ``jsonl`` has them.

    Raises:
        DataError: as ``read_documents``; while reading for what ``conversation_of`` refuses.
    """
    return _read_jsonl(corpus_files("chat", paths), conversation_of)


def corpus_files(corpus_format: CorpusFormat, paths: Sequence[str]) -> list[Path]:
    """The files of a corpus, none for ``pydoc_topics``, in the order of ``paths`` and sorted within each; see there."""
    if corpus_format not in get_args(CorpusFormat):
        raise DataError(f"unknown corpus format {corpus_format!r}: choose one of {', '.join(get_args(CorpusFormat))}")
    if corpus_format == "pydoc_topics":
        return []
    if isinstance(paths, str):
        raise TypeError("paths is a list of paths, not one string")
    if not paths:
        raise DataError(f"a corpus of format {corpus_format!r} needs at least one path")
    found: dict[Path, None] = {}
    for path in paths:
        matches = _matches(path, _FOLDER_SUFFIXES[corpus_format])
        if not matches:
            raise DataError(f"no file of the corpus at {path!r} (format {corpus_format!r}): correct the path")
        found.update(dict.fromkeys(matches))
    return list(found)


def corpus_identity(
    corpus_format: CorpusFormat, paths: Sequence[str] = (), text_key: str = "text"
) -> dict[str, object]:
    """What tells one corpus from another, wherever its files lie.

    Files up to 256 MiB enter with all their bytes, larger ones with their size and 64 blocks of 1 MiB spread evenly.

    Returns:
        format, text_key (jsonl only), files, bytes and fingerprint, the hexadecimal xxh3_128 of the content.
    """
    digest = xxhash.xxh3_128()
    files = corpus_files(corpus_format, paths)
    sizes = []
    if corpus_format == "pydoc_topics":
        contents = [text.encode() for text in _pydoc_topics()]
        sizes = [len(content) for content in contents]
        for content in contents:
            digest.update(f"{len(content)}:".encode())
            digest.update(content)
    for path in files:
        sizes.append(path.stat().st_size)
        digest.update(f"{sizes[-1]}:".encode())
        _hash_file(path, sizes[-1], digest)
    identity: dict[str, object] = {"format": corpus_format}
    if corpus_format == "jsonl":
        identity["text_key"] = text_key
    return identity | {"files": len(files), "bytes": sum(sizes), "fingerprint": digest.hexdigest()}


def _pydoc_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics (a stripped installation): use another Python or another corpus"
        ) from error
    return [topics[name] for name in sorted(topics)]


def _matches(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    root = Path(path)
    if root.is_file():
        return [root]
    if root.is_dir():
        endings = suffixes + tuple(f"{suffix}.gz" for suffix in suffixes)
        return sorted(
            file
            for file in root.rglob("*")
            if file.name.endswith(endings)
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
        )
    return sorted(file for file in map(Path, glob.glob(path, recursive=True)) if file.is_file())


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return open(path, "rb")


def _read_text(path: Path) -> str:
    try:
        with _open(path) as file:
            return file.read().decode()
    except (UnicodeDecodeError, *_READ_ERRORS) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _read_jsonl[T](files: Sequence[Path], read: Callable[[Any, str], T]) -> Iterator[T]:
    """What ``read`` makes of the JSON value of each line that is not empty, given where it stands."""
    for path in files:
        number = 0
        try:
            with _open(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        place = f"{path}:{number}"
                        yield read(_json_of(line, place), place)
        except _READ_ERRORS as error:
            raise DataError(f"{path} cannot be read behind line {number}: {error}") from error


def _json_of(line: bytes, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not valid JSON: {error}") from error


def _text_of(text_key: str, value: Any, place: str) -> str:
    if not isinstance(value, dict):
        raise DataError(f"{place} holds a JSON {type(value).__name__}, an object with the key {text_key!r} is needed")
    if text_key not in value:
        raise DataError(
            f"{place} has no key {text_key!r}, only {', '.join(sorted(map(repr, value)))}: correct the text_key"
        )
    return checked_text(value[text_key], f"{place}: the value of {text_key!r}")


def _hash_file(path: Path, size: int, digest: xxhash.xxh3_128) -> None:
    with open(path, "rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return
        for index in range(_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * index // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
