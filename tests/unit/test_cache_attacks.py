"""One attack at a time: files whose checksums are right and whose content means harm end in one error that says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import xxhash

from megatron_kd.cache.array_writer import ArrayWriter
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.manifest import _identity_hash
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import Cache
from megatron_kd.cache.verify import verify
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import commit_path, folder_of, make_cache, shards_folder

MEMORY = 4 << 20  # bytes that reading the small cache may take at most, attacked or not
ROWS = [300, 1, 40]
RANK = "rank/c.0.0"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache, _ = make_cache(tmp_path / "c", ROWS, 3)
    tracemalloc.start()
    CacheReader(cache.location).read(0)
    assert tracemalloc.get_traced_memory()[1] < MEMORY
    tracemalloc.stop()
    return cache


def _refused(cache: Cache, *words: str) -> None:
    """Reading ends in one CacheError with all the words, without much memory; verify goes on or says the same."""
    tracemalloc.start()
    try:
        with pytest.raises(CacheError) as caught:
            CacheReader(cache.location).read(0)
        text = str(caught.value)
        assert all(word in text for word in words), text
        found = _problem_of_verify(cache)
        assert found is None or all(word in found for word in words if not word.startswith("sample")), found
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def _problem_of_verify(cache: Cache) -> str | None:
    """The message of an error that leaves nothing to verify; None where the report names the shard."""
    try:
        report = verify(cache.location, "deep")
    except CacheError as error:
        return str(error)
    assert report.damaged_shards == [0]
    return None


def _folder(cache: Cache) -> Path:
    return shards_folder(cache) / read_commit(cache, 0).attempt


def _replace(cache: Cache, name: str, data: bytes) -> None:
    """Puts other bytes in a file's place, with size and hash of the record to match."""
    (_folder(cache) / name).write_bytes(data)
    entry = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    _change_record(cache, lambda record: record["objects"].update({name: entry}))


def _change_record(cache: Cache, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(commit_path(cache, 0).read_text())
    change(record)
    commit_path(cache, 0).write_text(json.dumps(record))


def _change_manifest(cache: Cache, **fields: Any) -> None:
    path = folder_of(cache) / "cache.json"
    values = json.loads(path.read_text()) | fields
    values["cache_id"] = _identity_hash({name: value for name, value in values.items() if name != "cache_id"})
    path.write_text(json.dumps(values))
    _change_record(cache, lambda record: record.update(cache_id=values["cache_id"]))


def _crc(data: bytes) -> bytes:
    return google_crc32c.value(data).to_bytes(4, "little")


OTHER = "000000-" + "0" * 32


@pytest.mark.parametrize(
    "attempt",
    [
        "../../x",
        "/etc",
        "",
        ".",
        "000001-" + "0" * 32,
        OTHER + "/..",
        OTHER + "\n",
        "000000-" + "A" * 32,
        0,
        None,
        [OTHER],
    ],
)
def test_an_attempt_that_is_no_name_of_this_shard(cache: Cache, attempt: Any) -> None:
    if isinstance(attempt, str) and attempt.startswith("000001"):
        shutil.copytree(_folder(cache), shards_folder(cache) / attempt)  # the files are there, and sound
    _change_record(cache, lambda record: record.update(attempt=attempt))
    _refused(cache, "sample 0 of", "000000.json does not have the fields of shard 0", "capture --repair")


@pytest.mark.parametrize("name", ["../../../cache.json", "/etc/passwd", "rank/c.0.1", "rank\0", ""])
def test_objects_with_other_names(cache: Cache, name: str) -> None:
    def add(record: dict[str, Any]) -> None:
        record["objects"][name] = record["objects"][RANK]

    def rename(record: dict[str, Any]) -> None:
        record["objects"][name] = record["objects"].pop(RANK)

    original = commit_path(cache, 0).read_text()
    for change in (add, rename):
        commit_path(cache, 0).write_text(original)
        _change_record(cache, change)
        _refused(cache, "000000.json does not have the fields of shard 0")


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, 2**31), (4, 2**32 - 1), (4, 0), (4, 16), (12, 2**32 - 1), (12, 0), (12, 20), (8, 2**32 - 1), (8, 0)],
    ids=lambda value: str(value),
)
def test_sizes_in_the_blosc_header(cache: Cache, at: int, value: int) -> None:
    """At 4 decoded bytes, at 8 the block, at 12 the stored bytes; the crc32c is right."""
    data = bytearray((_folder(cache) / RANK).read_bytes())
    offset, size = struct.unpack("<QQ", data[-36:-20])  # the first of two index entries
    data[offset + at : offset + at + 4] = value.to_bytes(4, "little")
    data[offset + size - 4 : offset + size] = _crc(bytes(data[offset : offset + size - 4]))
    _replace(cache, RANK, bytes(data))
    _refused(cache, f"{RANK}: inner chunk 0 does not decode to {256 * 5 * 4} bytes")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ((2**64 - 1, 2**64 - 1), "inner chunk 0 (elements 0 to 255) was never written"),
        ((2**64 - 2, 100), "inner chunk 0 (elements 0 to 255) is cut off"),
        ((2**64 - 50, 100), "is cut off"),  # the sum wraps to 50 in 64 bits
        ((0, 2**64 - 2), "is cut off"),
        ((2**63, 2**63), "is cut off"),  # the sum wraps to 0
        ((0, 0), "is cut off"),
        ((0, 4), "is cut off"),
    ],
)
def test_index_entries_beyond_the_file(cache: Cache, entry: tuple[int, int], words: str) -> None:
    data = (_folder(cache) / RANK).read_bytes()
    index = struct.pack("<QQ", *entry) + data[-20:-4]
    _replace(cache, RANK, data[:-36] + index + _crc(index))
    _refused(cache, RANK, words)


def test_index_entries_over_each_other_and_over_the_index(cache: Cache) -> None:
    data = (_folder(cache) / RANK).read_bytes()
    index = struct.pack("<QQQQ", 0, len(data) - 40, 0, len(data) - 40)
    _replace(cache, RANK, data[:-36] + index + _crc(index))
    _refused(cache, f"{RANK}: its inner chunks overlap, the shard index is damaged")
    index = struct.pack("<QQQQ", len(data) - 60, 60, *struct.unpack("<QQ", data[-20:-4]))
    _replace(cache, RANK, data[:-36] + index + _crc(index))
    _refused(cache, f"{RANK}: inner chunk 0 (elements 0 to 255) fails its crc32c")


@pytest.mark.parametrize("name", ["sample_offsets", "document_index"])
@pytest.mark.parametrize(
    "middle",
    [(2**63 - 1, 2**63 - 1), (2**63 - 2, 2**63 - 1), (-(2**63), 1), (2, 1), (1, 1), (-1, 1), (10**6, 10**6 + 1)],
    ids=str,
)
def test_row_bounds_that_lie(cache: Cache, name: str, middle: tuple[int, int]) -> None:
    folder, spec = _folder(cache), cache.manifest.arrays[name]
    last = sum(ROWS) if name == "sample_offsets" else None
    if last is None:
        reader = CacheReader(cache)
        last = sum(len(reader.read(sample).document_offsets) for sample in range(3))
    shutil.rmtree(folder / name)
    writer = ArrayWriter(folder / name, spec)
    writer.append(np.array([0, *middle, last], "<i8"))
    written = writer.close()
    _change_record(cache, lambda record: record["objects"].update(written))
    _refused(cache, f"{name} does not rise from 0 to {last} in 3 steps")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [2**62, 5], "chunk_shape": [2**62, 5]}, "less than its index of"),
        ({"shape": [2**31, 5], "chunk_shape": [2**31, 5]}, "less than its index of"),
        (
            {"shape": [341, 2**31], "chunk_shape": [512, 2**31], "inner": [256, 2**31]},
            "has chunks of 2199023255552 bytes",
        ),
        ({"shape": [-1, 5]}, "must be positive integers"),
        ({"shape": [float("nan"), 5]}, "must be positive integers"),
        ({"shape": [10**400, 5]}, "must be positive integers"),
        ({"shape": 10**400}, "must be positive integers"),
    ],
    ids=range(7),
)
def test_sizes_in_zarr_metadata(cache: Cache, change: dict[str, Any], words: str) -> None:
    metadata = json.loads((_folder(cache) / "rank/zarr.json").read_text())
    metadata["shape"] = change["shape"]
    if "chunk_shape" in change:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = change["chunk_shape"]
    if "inner" in change:
        metadata["codecs"][0]["configuration"]["chunk_shape"] = change["inner"]
    _replace(cache, "rank/zarr.json", json.dumps(metadata).encode())
    _refused(cache, "rank", words)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_json_nested_deeply(cache: Cache, tmp_path: Path, opening: bytes) -> None:
    many, _ = make_cache(tmp_path / "many", [1] * 4000, 4000)  # its records may be long
    (commit_path(many, 0)).write_bytes(opening * 100_000)
    with pytest.raises(
        CacheError, match=r"000000\.json is damaged: its values are nested too deeply; `megatron-kd cap"
    ):
        CacheReader(many.location).read(0)
    _replace(cache, "rank/zarr.json", opening * 10_000)
    _refused(cache, "rank cannot be opened: its values are nested too deeply")
    _replace(cache, "rank/zarr.json", opening * 100_000)
    _refused(cache, "rank/zarr.json has ", "more than the 65536 that such a file may have")
    (folder_of(cache) / "cache.json").write_bytes(opening * 100_000)
    _refused(cache, "cache.json is not JSON: its values are nested too deeply")


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("cache.json", r"16777216"),
        ("commits/000000.json", r"\d{5}"),
        ("rank_table", "256"),
        ("rank/zarr.json", "65536"),
    ],
)
def test_a_file_of_a_gigabyte_is_not_read(cache: Cache, name: str, limit: str) -> None:
    path = _path(cache, name)
    os.truncate(path, 2**30)
    _refused(cache, path.name, "has 1073741824 bytes, more than the ")
    with pytest.raises(CacheError, match=rf"has 1073741824 bytes, more than the {limit} that such a file may have"):
        CacheReader(cache.location).read(0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 2**31}, "top_k 2147483648 is larger than the vocabulary of 64"),
        ({"top_k": 2**31, "vocab_size": 2**31}, "vocab_size of a cache is 2147483648, at most 16777216"),
        ({"top_k": 2**20, "vocab_size": 2**24}, "top_k of a cache is 1048576, at most 262144"),
        ({"rows": 2**62}, "shards, at most 1048576 are possible"),
        ({"rows": 2**62, "rows_per_shard": 2**61}, "rows_per_shard of a cache is 2305843009213693952, at most"),
        ({"rows": 10**400}, "shards, at most 1048576 are possible"),
        ({"rows": float("nan")}, "rows of a cache must be a positive integer, not nan"),
        ({"top_k": float("inf")}, "top_k of a cache must be a positive integer, not inf"),
        ({"rows": 1e308}, "rows of a cache must be a positive integer, not 1e+308"),
        ({"rows": True}, "rows of a cache must be a positive integer, not True"),
        ({"temperatures": [float("nan")]}, "temperatures must be positive and distinct"),
        ({"temperatures": [1.0, float("inf")]}, "temperatures must be positive and distinct"),
        ({"temperatures": [1.0, 10**400]}, "temperatures must be positive and distinct"),
        ({"temperatures": [1.0] * 65}, "temperatures that are no list of at most 64"),
        ({"rank_table_hash": "../../../etc/passwd"}, "rank_table_hash that is not 32 hexadecimal digits"),
    ],
    ids=range(15),
)
def test_numbers_in_the_manifest(cache: Cache, fields: dict[str, Any], words: str) -> None:
    _change_manifest(cache, **fields)
    _refused(cache, "cache.json", words)


WRONG: list[Any] = [float("nan"), float("inf"), 1e308, 10**400, -1, True, "3", None, [3]]


@pytest.mark.parametrize("value", [*WRONG, 0], ids=str)
@pytest.mark.parametrize("field", ["rows", "tokens", "bytes"])
def test_numbers_in_a_record(cache: Cache, field: str, value: Any) -> None:
    if field == "bytes":
        _change_record(cache, lambda record: record["objects"][RANK].update(bytes=value))
    else:
        _change_record(cache, lambda record: record.update({field: value}))
    _refused(cache, "000000.json does not have the fields of shard 0")


@pytest.mark.parametrize("value", [*WRONG, 1], ids=str)
def test_the_number_of_a_shard_in_its_record(cache: Cache, value: Any) -> None:
    _change_record(cache, lambda record: record.update(shard_index=value))
    _refused(cache, "000000.json does not have the fields of shard 0")


def test_a_number_of_more_digits_than_are_parsed(cache: Cache) -> None:
    for path in (commit_path(cache, 0), folder_of(cache) / "cache.json"):
        path.write_text(re.sub(r'"rows": \d+', f'"rows": {"9" * 5000}', path.read_text()))
        _refused(cache, path.name, "Exceeds the limit (4300 digits)")


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
@pytest.mark.parametrize(
    "name", ["cache.json", "rank_table", "commits/000000.json", RANK, "rank/zarr.json", "tokens/c.0"]
)
def test_what_is_not_a_file(cache: Cache, name: str, kind: str) -> None:
    path = _path(cache, name)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    _refused(cache, f"{path.name} is not a file")


def _path(cache: Cache, name: str) -> Path:
    if name == "rank_table":
        (path,) = folder_of(cache).glob("rank_table-*")
        return path
    return (folder_of(cache) if name.startswith("c") else _folder(cache)) / name
