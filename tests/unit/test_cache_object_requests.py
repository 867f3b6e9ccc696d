"""What a cache asks of an object store, counted at a real S3 server, and what happens when the store goes away."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans, write_shard
from megatron_kd.errors import CacheError, StoreUnreachableError
from tests.unit.cache_object_server import BUCKET, object_server
from tests.unit.cache_rows import assert_rows_equal, make_manifest, make_row, rank_table

LENGTH = 4096
ROW_ARRAYS = ["logprob_delta", "loss_mask", "rank", "tail_logmass", "tokens"]
ARRAYS = sorted([*ROW_ARRAYS, "document_index", "document_starts", "sample_offsets"])


def _fill(url: str) -> Cache:
    cache = create_cache(url, make_manifest(4, 2), rank_table())
    for shard in range(2):
        assert write_shard(cache, shard, [make_row(s, LENGTH) for s in cache.manifest.shard_samples(shard)])
    return cache


class _Log:
    """The requests since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def new(self) -> list[tuple[str, str]]:
        """Method and name of each, shards without the names of their attempts."""
        lines = self._path.read_text().splitlines()
        found = [re.search(r'"(?:\x1b\[[\d;]*m)*([A-Z]+) /([^ ?]*)', line) for line in lines[self._seen :]]
        self._seen = len(lines)
        return [(match[1], re.sub(r"shards/0+(\d)-\w+", r"shards/\1", match[2])) for match in found if match]


def test_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _Log(tmp_path / "requests")
    with object_server(tmp_path / "requests") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cache = _fill(f"s3://{BUCKET}/c")
        log.new()
        reader = CacheReader(cache.location)
        assert sorted(method for method, _ in log.new()) == ["GET", "GET"], "manifest and rank table"
        reader.read(1)
        opened = Counter(log.new())
        values = Counter(("GET", f"{BUCKET}/c/shards/0/{name}/c{'.0' * dimensions}") for name, dimensions in _names())
        for name, _ in _names():
            array = f"{BUCKET}/c/shards/0/{name}"
            assert opened["GET", f"{array}/zarr.json"] == 1
        assert opened["GET", f"{BUCKET}/c/commits/000000.json"] == 1
        # of each array the index and what is read of it; sizes are in the record, nothing asks for them
        assert opened.total() == 1 + len(ARRAYS) * 3 and all(opened[request] == 2 for request in values)
        assert opened.total() - len(ROW_ARRAYS) == 20, "requests to open a shard, as the documentation says"
        assert_rows_equal(reader.read(0), make_row(0, LENGTH))
        row = Counter(log.new())
        wanted = {request for request in values if request[1].split("/")[-2] in ROW_ARRAYS}
        assert row == dict.fromkeys(wanted, 1) and len(wanted) == 5
        reader.read_slice(0, 2000, 2600)
        assert Counter(log.new()) == dict.fromkeys(wanted, 1), "a slice too"
        alone = verify(cache.location, "deep")
        assert alone.ok and alone.rows_committed == 4 and not orphans(cache)
        log.new()
        assert verify(cache.location, "deep", workers=2) == alone
        verify(cache.location, "crc", shards=[1])
        part = log.new()[-40:]
        assert not [name for _, name in part if "/shards/0/" in name or "000000.json" in name]


def _names() -> list[tuple[str, int]]:
    return [(name, 2 if name in ("rank", "logprob_delta") else 1) for name in ARRAYS]


def test_a_store_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open reader names sample and object in bounded time; a verification ends and calls nothing damaged."""
    with object_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cache = _fill(f"s3://{BUCKET}/c")
        reader = CacheReader(cache.location)
        assert_rows_equal(reader.read(1), make_row(1, LENGTH))
    began = time.monotonic()
    with pytest.raises(CacheError) as caught:
        reader.read(0)
    assert time.monotonic() - began < 180 + 60  # the library's limit for retries, and one request
    assert re.match(
        rf"sample 0 of s3://{BUCKET}/c cannot be used: s3://{BUCKET}/c/shards/000000-\w+/\w+/c[.0]+ cannot be reached: "
        r"Generic S3 error: .* after 10 retries",
        str(caught.value),
    ), caught.value
    assert "damaged" not in str(caught.value) and "remove" not in str(caught.value)
    with pytest.raises(StoreUnreachableError, match=r"c/commits cannot be reached"):
        verify(cache, "crc")
