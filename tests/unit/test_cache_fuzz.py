"""Damaged and hostile caches: the right rows or a CacheError, never another exception, a crash or memory without bound.

Everything runs in a child with a limit on its memory, since a fault here may be one of the process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.manifest import _identity_hash
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.verify import verify
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import assert_rows_equal, make_cache, make_row

LENGTHS = [300, 1, 40]
EXAMPLES = 200
MEMORY = 512 << 20  # bytes of address space beyond what the child has at its start
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([2**63 - 1, 2**62, 2**31, 1e308])
    | st.sampled_from(["", "..", "../../etc/passwd", "/etc/passwd", "0" * 32, "float32", "x\0y"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def _sealed(path: Path, folder: Path) -> None:
    """Makes checksums fit after a change, as whoever means harm would."""
    if path.name == "cache.json":
        values = json.loads(path.read_bytes())
        if isinstance(values, dict):
            values["cache_id"] = _identity_hash({name: value for name, value in values.items() if name != "cache_id"})
            path.write_text(json.dumps(values))
            for record_path in (folder / "commits").iterdir():
                record = json.loads(record_path.read_bytes())
                record_path.write_text(json.dumps(record | {"cache_id": values["cache_id"]}))
        return
    if "shards" not in path.parts:
        return
    data = bytearray(path.read_bytes())
    if path.name != "zarr.json" and len(data) > 20:
        entries = np.frombuffer(json.dumps([]).encode(), "u1")[:0]
        for size in range(16, min(len(data) - 4, 256), 16):  # the index of a small array
            index = np.frombuffer(bytes(data[-4 - size : -4]), "<u8").reshape(-1, 2)
            if (index.sum(1, dtype="f8") <= len(data)).all() and (index[:, 1] > 4).all():
                entries = index
        for offset, length in entries.tolist():
            end = offset + length - 4
            data[end : end + 4] = google_crc32c.value(bytes(data[offset:end])).to_bytes(4, "little")
        if len(entries):
            size = 16 * len(entries)
            data[-4:] = google_crc32c.value(bytes(data[-4 - size : -4])).to_bytes(4, "little")
        path.write_bytes(data)
    (record_path,) = (folder / "commits").iterdir()
    record = json.loads(record_path.read_bytes())
    name = path.relative_to(folder / "shards" / record["attempt"]).as_posix()
    record["objects"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(bytes(data)).hexdigest()}
    record_path.write_text(json.dumps(record))


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*at, key))
    return found


def _damage(draw: Callable[..., Any], files: list[Path]) -> Path:
    path: Path = draw(st.sampled_from(files))
    data = bytearray(path.read_bytes())
    how = draw(st.sampled_from(["flip", "set", "cut", "extend", "splice", "swap", "json", "header"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "json" and path.suffix == ".json":
        value = json.loads(data)
        *parents, last = draw(st.sampled_from(_places(value)[1:]))
        inner = value
        for key in parents:
            inner = inner[key]
        inner[last] = draw(_JSON)
        data = bytearray(json.dumps(value).encode())
        data = (
            draw(st.sampled_from([data, bytearray(b"[" * 100_000), bytearray(b'{"a":' * 50_000)]))
            if at % 9 == 0
            else data
        )
    elif how == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "set":
        data[at : at + 8] = draw(st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f"]))
    elif how == "cut":
        del data[at:]
    elif how == "extend":
        data += draw(st.binary(max_size=200))
    elif how == "splice":
        other = draw(st.sampled_from(files)).read_bytes()
        data[at:at] = other[: draw(st.integers(0, len(other)))]
    elif how == "swap":
        data = bytearray(draw(st.sampled_from(files)).read_bytes())
    else:  # the sizes that blosc believes, of the first chunk; the last entries of an index
        place = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, max(len(data) - 20, 0), max(len(data) - 12, 0)]))
        data[place : place + 4] = draw(st.integers(0, 2**32 - 1)).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def _use(folder: Path, exact: bool) -> None:
    """Does with a cache all that a reader does; only a CacheError may come of it."""
    wanted = [make_row(sample, length) for sample, length in enumerate(LENGTHS)]
    try:
        reader = CacheReader(folder)
    except CacheError:
        reader = None
    for sample, row in enumerate(wanted):
        if reader is None:
            break
        try:
            found = reader.read(sample, row.hash)
            reader.read_slice(sample, 0, 1)
        except CacheError:
            continue
        assert np.array_equal(found.tokens, row.tokens)  # the row hash holds against anyone
        if exact:
            assert_rows_equal(found, row)
    for check in (lambda: verify(folder, "deep"), lambda: inspect(folder)):
        try:
            check()
        except CacheError:
            continue


def _campaign(sealed: bool) -> None:
    import logging

    logging.disable()
    with tempfile.TemporaryDirectory() as temporary:
        good = Path(temporary) / "good"
        make_cache(good, LENGTHS, 3)
        _use(good, exact=True)

        @seed(4)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            bad = Path(temporary) / "bad"
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            files = sorted(path for path in bad.rglob("*") if path.is_file())
            path = _damage(data.draw, files)
            if sealed:
                try:
                    _sealed(path, bad)
                except (ValueError, RecursionError, TypeError, KeyError):
                    return  # nothing that has checksums any more
            _use(bad, exact=not sealed and path.suffix != ".json")

        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))
        run()


@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "hostile"])
def test_any_damage_ends_in_right_rows_or_a_cache_error(sealed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.unit.test_cache_fuzz import _campaign; _campaign({sealed})"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
