"""One contract for both storages, and whole caches in an object store. The store is a real S3 server on loopback."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.cache.clean import clean
from megatron_kd.cache.commits import discard_shard, read_commit
from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.local_staging import make_staging, remove_staging
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.storage import LocalStorage, Storage, is_url, open_storage
from megatron_kd.cache.storage_objects import ObjectStorage
from megatron_kd.cache.store import Cache, cache_exists, create_cache, missing_shards
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans, remove_orphans, write_shard
from megatron_kd.errors import CacheError, StoreUnreachableError
from tests.unit.cache_object_server import BUCKET, lossy_connection, object_server
from tests.unit.cache_rows import assert_rows_equal, make_manifest, make_row, rank_table

LENGTHS = (300, 1, 700, 20)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    before = dict(os.environ)
    with object_server() as environment:
        os.environ.update(environment)
        yield environment
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(params=["local", "object"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        found = open_storage(tmp_path / "root")
        assert isinstance(found, LocalStorage)
    else:
        request.getfixturevalue("server")
        found = open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}/root/")
        assert isinstance(found, ObjectStorage)
    found.prepare("a")
    return found


def _fill(url: str) -> Cache:
    cache = create_cache(url, make_manifest(4, 2), rank_table())
    for shard in range(2):
        assert write_shard(cache, shard, [make_row(s, LENGTHS[s]) for s in cache.manifest.shard_samples(shard)])
    return cache


def test_files(storage: Storage) -> None:
    assert not storage.exists("a/x.bin")
    with pytest.raises(FileNotFoundError):
        storage.read("a/x.bin", 10)
    with pytest.raises(FileNotFoundError):
        storage.open("a/x.bin")
    assert storage.create("a/x.bin", b"0123456789")
    assert not storage.create("a/x.bin", b"another")
    assert storage.exists("a/x.bin") and storage.read("a/x.bin", 10) == b"0123456789"
    with pytest.raises(CacheError, match=r"a/x\.bin has 10 bytes, more than the 9"):
        storage.read("a/x.bin", 9)
    file = storage.open("a/x.bin")
    assert file.size == 10 and file.where == storage.where("a/x.bin")
    assert file.read([(8, 10), (0, 3)]) == [b"89", b"012"]
    assert file.read([(2, 4), (2, 3), (0, 10), (9, 10)]) == [b"23", b"2", b"0123456789", b"9"]
    with pytest.raises((CacheError, OSError)):
        file.read([(8, 11)])
    file.close()
    assert storage.open("a/x.bin", 10).read([(0, 3)]) == [b"012"]
    for size in (9, 11):
        with pytest.raises(CacheError, match=rf"a/x\.bin has 10 bytes, its commit record says {size}"):
            storage.open("a/x.bin", size).read([(0, 3)])
    assert storage.below("a").read("x.bin", 10) == b"0123456789"
    assert [(f.name, f.size) for f in storage.files()] == [("a/x.bin", 10)]
    assert [f.name for f in storage.below("a").files()] == ["x.bin"]
    assert abs(storage.files()[0].modified - time.time()) < 600
    assert (storage.names(), storage.below("a").names()) == (["a"], ["x.bin"])
    assert storage.together([lambda: storage.read("a/x.bin", 10), lambda: b""]) == [b"0123456789", b""]


def test_folders(storage: Storage) -> None:
    staged = storage.staging("a/attempt")
    (staged / "inner").mkdir()
    big = os.urandom(6 << 20)  # more than one part of an upload
    (staged / "inner" / "big").write_bytes(big)
    (staged / "small").write_bytes(b"s")
    with pytest.raises(CacheError, match=r"gone is gone: another program"):
        storage.publish(staged, "a/attempt", ["small", "gone"])
    assert not storage.exists("a/attempt/small") or isinstance(storage, LocalStorage)
    storage.publish(staged, "a/attempt", ["small", "inner/big"])
    storage.published(staged)
    storage.create("a/attempt-2", b"neighbour")
    assert [f.name for f in storage.below("a/attempt").files()] == ["inner/big", "small"]
    assert storage.below("a/attempt").read("inner/big", len(big)) == big
    far_apart = [(5 << 20, (5 << 20) + 3), (1, 4)]
    assert storage.open("a/attempt/inner/big", len(big)).read(far_apart) == [big[b:e] for b, e in far_apart]
    assert storage.total_bytes("a/attempt") == len(big) + 1
    written = storage.last_written("a/attempt")
    assert written is not None and abs(written - time.time()) < 600
    storage.remove("a/attempt")
    storage.remove("a/attempt")
    assert storage.last_written("a/attempt") is None and storage.total_bytes("a/attempt") == 0
    assert storage.names() == ["a"] and storage.below("a").names() == ["attempt-2"]
    storage.remove("a/attempt-2")
    assert storage.files() == []


def _create(i: int, location: str, barrier: Any, queue: Any) -> None:
    storage = open_storage(location)
    barrier.wait(60)
    queue.put((i, storage.create("a/winner", f"by {i}".encode())))


def test_one_of_racing_creators_wins(storage: Storage) -> None:
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(3)
    racers = [context.Process(target=_create, args=(i, storage.location, barrier, queue)) for i in range(3)]
    for racer in racers:
        racer.start()
    try:
        results = dict(queue.get(timeout=90) for _ in racers)
    finally:
        for racer in racers:
            racer.join(5)
            racer.kill()
    (winner,) = [i for i, won in results.items() if won]
    assert storage.read("a/winner", 99) == f"by {winner}".encode()


def test_a_put_whose_answer_was_lost_is_ours(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks again and is told that the object exists: it is this writer's, and so is the commit."""
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        first = method == "PUT" and path not in lost and ("/commits/" in path or path.endswith("/x"))
        lost.extend([path] * first)
        return first

    with lossy_connection(server["AWS_ENDPOINT_URL"], lose) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        storage = open_storage(url)
        assert storage.create("x", b"ours") and len(lost) == 1
        assert storage.create("a/x", b"ours") and len(lost) == 2
        for others in (b"our", b"ours and more", b"else"):
            assert not storage.create("x", others)
        lost.clear()
        assert not storage.create("x", b"else") and len(lost) == 1, "it exists, and nobody said so at first"
        cache = _fill(f"{url}/c")
        assert len(lost) == 3, "of both commits"
        assert missing_shards(cache) == [] and orphans(cache) == []
        assert_rows_equal(CacheReader(cache).read(3), make_row(3, LENGTHS[3]))
        # Another writer's commit between this one's look and its put, whose answer is lost: beaten, and cleaned up.
        discard_shard(cache, 1, read_commit(cache, 1).attempt)
        lost.clear()
        rows = [make_row(s, LENGTHS[s]) for s in cache.manifest.shard_samples(1)]

        def slowly() -> Iterator[Row]:
            yield rows[0]
            assert write_shard(cache, 1, rows)
            lost.clear()
            yield rows[1]

        (left,) = orphans(cache)
        assert not write_shard(cache, 1, slowly()) and len(lost) == 1
        assert orphans(cache) == [left] and verify(cache, "deep").ok


@pytest.mark.parametrize("theirs", [False, True])
def test_a_commit_whose_link_was_made_and_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: bool) -> None:
    """As over NFS, where the answer to a link may be lost and the second one says that the file exists."""
    cache = create_cache(tmp_path / "c", make_manifest(1, 1), rank_table())
    link = os.link
    rows = [make_row(0, 300)]

    def asked_twice(source: Path, target: Path) -> None:
        with suppress(FileExistsError):
            link(source, target)
        link(source, target)

    def slowly() -> Iterator[Row]:
        if theirs:
            assert write_shard(cache, 0, rows)
        yield rows[0]

    monkeypatch.setattr(os, "link", asked_twice)
    assert write_shard(cache, 0, slowly()) is not theirs
    assert orphans(cache) == [] and verify(cache, "deep").ok
    assert_rows_equal(CacheReader(cache).read(0), rows[0])


@pytest.mark.parametrize("step", ["publish", "create"])
def test_a_store_that_goes_away_leaves_no_local_folder(
    server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = create_cache(f"s3://{BUCKET}/{uuid.uuid4().hex}", make_manifest(1, 1), rank_table())
    staged: list[Path] = []
    there = iter([False])  # the answer to whether the shard is committed, before it is written; later there is none

    def away(*_: object) -> bool:
        staged.extend(tmp_path.iterdir())
        raise StoreUnreachableError("no answer in three minutes")

    monkeypatch.setattr(ObjectStorage, step, away)
    monkeypatch.setattr(ObjectStorage, "exists", lambda *_: next(there) if not staged else away())
    with pytest.raises(StoreUnreachableError, match="no answer"):
        write_shard(cache, 0, [make_row(0, 300)])
    assert len({*staged}) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["local", "object"])
def test_no_shard_is_committed_whose_files_were_cleared_away(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As by a program that purges old files from a scratch disk: those that are open can be written to the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if kind == "object":
        request.getfixturevalue("server")
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}" if kind == "object" else str(tmp_path / "c")
    cache = create_cache(url, make_manifest(1, 1), rank_table())

    def purged() -> Iterator[Row]:
        yield make_row(0, 300)
        for path in tmp_path.glob("megatron-kd-staging-*/rank/*" if kind == "object" else "c/shards/*/rank/*"):
            path.unlink()

    with pytest.raises(CacheError, match=r"rank/.* is gone: another program removes"):
        write_shard(cache, 0, purged())
    assert missing_shards(cache) == [0]


_STAGE = """
import sys, tempfile
from megatron_kd.cache.local_staging import make_staging
tempfile.tempdir = sys.argv[1]
path = make_staging("000000-0")
(path / "rank").write_bytes(bytes(100))
print(path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_staged_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _STAGE, str(tmp_path)]
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        killed, living, fresh = (Path(child.stdout.readline().strip()) for child in children if child.stdout)
        for i in (0, 2):
            children[i].kill()
            children[i].wait()
        ours = make_staging("000001-0")
        assert {*tmp_path.iterdir()} == {killed, living, fresh, ours}, "what is new may be one that is not locked yet"
        for path in (killed, living, ours):
            os.utime(path, (time.time() - 90,) * 2)
        other = tmp_path / "another-program-s"
        other.mkdir()
        os.utime(other, (0, 0))
        again = make_staging("000001-0")
        assert {*tmp_path.iterdir()} == {living, fresh, ours, again, other}
        assert (living / "rank").read_bytes() == bytes(100)
        remove_staging(ours)
        remove_staging(again)
        assert {*tmp_path.iterdir()} == {living, fresh, other}
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(CacheError, match="is not a file"):
            LocalStorage(tmp_path).read(name, 10)


def test_what_the_system_does_not_tell_is_no_no(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "circle").symlink_to("circle")
    storage = LocalStorage(tmp_path)
    assert storage.exists("file") and not storage.exists("none") and not storage.exists("file/none")
    with pytest.raises(OSError, match="symbolic links"):
        storage.exists("circle")


def test_only_the_file_that_is_meant_is_removed(storage: Storage) -> None:
    storage.create("a/x", b"old")
    assert not storage.remove_if("a/x", lambda name: storage.read(name, 9) == b"new") and storage.exists("a/x")
    assert storage.remove_if("a/x", lambda name: storage.read(name, 9) == b"old")
    assert not storage.remove_if("a/x", storage.exists) and storage.files() == []


@pytest.mark.parametrize("third", [False, True])
def test_what_takes_its_place_between_the_look_and_the_removal_stays(tmp_path: Path, third: bool) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("x", b"old")

    def is_it(name: str) -> bool:
        found = storage.read(name, 9) == b"old"
        if name == "x":  # now others are faster
            storage.remove("x")
            storage.create("x", b"new")
        elif third:
            storage.create("x", b"newest")
        return found

    assert not storage.remove_if("x", is_it)
    assert storage.names() == ["x"] and storage.read("x", 9) == (b"newest" if third else b"new")


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    LocalStorage(tmp_path).remove("link")
    assert (tmp_path / "elsewhere" / "precious").exists() and not (tmp_path / "link").is_symlink()


def test_urls() -> None:
    assert is_url("s3://a/b") and is_url("gs://a") and is_url("az://a/b/c")
    assert not is_url("/a/b") and not is_url("s3:/a/b") and not is_url(Path("s3://a"))
    for lost in ("s3:/bucket/x", Path("s3://bucket/x"), "gs:/bucket/x"):
        with pytest.raises(CacheError, match=r"write (s3|gs)://bucket/x for an object store, /.*:/bucket/x for"):
            open_storage(lost)
    assert open_storage("a:b/c").location == "a:b/c" and open_storage("/s3:/a").location == "/s3:/a"


def test_a_bucket_that_is_not_there_is_named(server: dict[str, str]) -> None:
    for ask in (
        lambda: verify("s3://no-such-bucket/c"),
        lambda: create_cache("s3://no-such-bucket/c", make_manifest(1, 1), rank_table()),
        lambda: open_storage("s3://no-such-bucket/c").names(),
    ):
        with pytest.raises(StoreUnreachableError, match=r"no-such-bucket/c.* is in no such bucket: create the bucket"):
            ask()


def test_a_file_in_the_place_of_a_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    for place in (tmp_path / "notes", tmp_path / "notes" / "cache"):
        for ask in (cache_exists, verify):
            with pytest.raises(CacheError, match="notes is a file, a cache is a folder: name another path"):
                ask(place)


def test_a_whole_cache_in_an_object_store(server: dict[str, str]) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/cache"
    assert not cache_exists(url)
    with pytest.raises(CacheError, match=r"is not a cache: it has no cache\.json"):
        CacheReader(url)
    cache = _fill(url)
    assert cache_exists(url) and missing_shards(url) == [] and orphans(cache) == []
    assert not write_shard(url, 0, iter(()))
    reader = pickle.loads(pickle.dumps(CacheReader(url, open_shards=1)))
    for sample in (3, 0, 2, 1):
        assert_rows_equal(reader.read(sample), make_row(sample, LENGTHS[sample]))
    part = reader.read_slice(2, 500, 600)
    assert part.ids.tobytes() == make_row(2, 700).ids[500:600].tobytes()
    report = verify(url, "deep")
    assert report.ok and report.rows_committed == 4, report.problems
    seen = inspect(url)
    assert seen["complete"] and seen["path"] == url and seen["bytes"] > report.bytes
    assert not discard_shard(cache, 1, read_commit(cache, 0).attempt)
    assert discard_shard(cache, 1, read_commit(cache, 1).attempt)
    assert missing_shards(cache) == [1]
    (left,) = orphans(cache)
    assert remove_orphans(cache) == [] and [item.name for item in clean(url, dry_run=True).kept] == [left]
    assert remove_orphans(cache, idle_s=-60) == [left] and orphans(cache) == []
    with pytest.raises(CacheError, match=rf"sample 2 of {url} cannot be used: shard 1 .* never committed"):
        CacheReader(url).read(2)
    name = f"shards/{read_commit(cache, 0).attempt}/rank/c.0.0"
    cache.storage.remove(name)
    with pytest.raises(CacheError, match=rf"sample 0 of {url} .*rank"):
        CacheReader(url).read(0)
    assert any(name in problem for problem in verify(url, "inventory").problems)


def test_an_object_of_another_size_is_damage(server: dict[str, str]) -> None:
    """Sizes are taken from the record and not asked for: the answers to reads must tell."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/cache"
    cache = _fill(url)
    name = f"shards/{read_commit(cache, 0).attempt}/rank/c.0.0"
    whole = cache.storage.read(name, 1 << 24)
    for changed, said in (
        (whole[:-1], rf"has {len(whole) - 1} bytes, its commit record says {len(whole)}"),
        (whole + b"x", rf"has {len(whole) + 1} bytes, its commit record says {len(whole)}"),
        (whole[:3], rf"is truncated: it does not have {len(whole)} bytes"),
        (b"", rf"is truncated: it does not have {len(whole)} bytes"),
    ):
        cache.storage.remove(name)
        assert cache.storage.create(name, changed)
        with pytest.raises(CacheError, match=rf"sample 0 of {url} cannot be used: {cache.storage.where(name)} {said}"):
            CacheReader(url).read(0)
        assert verify(url, "structure").damaged_shards == [0]
        file = cache.storage.open(name, len(whole))
        with pytest.raises(CacheError, match=r"is truncated|its commit record says"):
            file.read([(0, 4), (len(whole) - 4, len(whole))])


def test_the_bounds_of_a_shard_come_together(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = _fill(f"s3://{BUCKET}/{uuid.uuid4().hex}").location
    three = threading.Barrier(3, timeout=30)  # passed by reads that run at the same time, by no others
    read = ArrayReader.read

    def waiting(array: ArrayReader, start: int, stop: int) -> np.ndarray:
        if array.spec.name in ("sample_offsets", "document_index", "document_starts"):
            three.wait()
        return read(array, start, stop)

    monkeypatch.setattr(ArrayReader, "read", waiting)
    assert_rows_equal(CacheReader(url).read(0), make_row(0, LENGTHS[0]))


def _read_in_child(url: str, queue: Any) -> None:
    try:
        CacheReader(url).read(0)
        queue.put("read")
    except CacheError as error:
        queue.put(str(error))


def test_a_forked_child_gets_an_error_and_a_spawned_one_reads(server: dict[str, str]) -> None:
    url = _fill(f"s3://{BUCKET}/{uuid.uuid4().hex}").location
    for method, said in (("fork", "cannot be used in a process that was forked"), ("spawn", "read")):
        context: Any = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=_read_in_child, args=(url, queue))
        child.start()
        try:
            assert said in queue.get(timeout=60)
        finally:
            child.kill()
            child.join()


def test_without_the_package_one_line_says_so() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from megatron_kd.cache.reader import CacheReader\n"
        "try: CacheReader('s3://a/b')\nexcept Exception as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CacheError s3://a/b is an object store")
    assert "pip install 'megatron-kd[object-store]'" in done.stdout


def test_a_local_cache_needs_no_package(tmp_path: Path) -> None:
    code = (
        "import json, sys\nfrom megatron_kd.cache.reader import CacheReader\n"
        "CacheReader(sys.argv[1]).read(0)\nprint(json.dumps('obstore' in sys.modules))"
    )
    _fill(str(tmp_path / "c"))
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
