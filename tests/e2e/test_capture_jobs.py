"""Jobs that share a capture, jobs that are told to stop, ranks that die, disks that refuse."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.store import committed_shards, open_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans
from tests.assets import ROOT, succeed
from tests.e2e.road import captured_road, one_error_line
from tests.unit.cache_rows import assert_rows_equal
from tests.warm import Started, start, warm

TP2 = ["parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"]
LAYOUTS = pytest.mark.parametrize("layout", [[], TP2], ids=["dp2", "tp2"])


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The arguments of a capture of 400 rows in 100 shards, which takes seconds; a cache has to be added."""
    folder, recipe = tmp_path_factory.mktemp("long"), captured_road() / "recipe.yaml"
    data = [f"data.samples={folder / 'samples'}", "data.train_tokens=19200", "data.heldout_tokens=null"]
    succeed(warm("prepare", recipe, *data))
    return ["capture", recipe, *data, "teacher.capture.rows_per_shard=4", "--json"]


def _commits(cache: Path) -> int:
    folder = cache / "commits"
    return len(list(folder.glob("*.json"))) if folder.is_dir() else 0


def _wait_for_commits(cache: Path, count: int) -> float:
    """Returns when there were so many."""
    deadline = time.monotonic() + 60
    while _commits(cache) < count:
        assert time.monotonic() < deadline, f"{_commits(cache)} shards after a minute"
        time.sleep(0.002)
    return time.monotonic()


def _report(job: Started) -> dict[str, object]:
    first, *others = job.wait()
    assert all(succeed(other).stdout == "" for other in others), "figures are printed once"
    report: dict[str, object] = json.loads(succeed(first).stdout)
    return report


def test_parts_make_one_cache(long: list[str | Path], tmp_path: Path) -> None:
    """Three jobs that start together, one of two ranks: one makes the cache, each does its part and no more."""
    cache = f"teacher.cache={tmp_path / 'cache'}"
    jobs = [
        start(*long, cache, "--part", "1/3"),
        start(*long, cache, "--part", "2/3", "cluster.gpus_per_node=2", ranks=2),
        start(*long, cache, "--part", "3/3"),
    ]
    reports = [_report(job) for job in jobs]
    assert [report["rows_captured"] for report in reports] == [4 * 33, 4 * 33, 4 * 34]
    assert any(report["complete"] for report in reports)
    assert all(report["complete"] == (report["missing_samples"] == "") for report in reports)
    assert verify(tmp_path / "cache", "deep").ok and not orphans(tmp_path / "cache")
    # Whoever captured a row, in whatever order: it is the same, bit for bit.
    _report(start(*long, f"teacher.cache={tmp_path / 'whole'}"))
    readers = [CacheReader(tmp_path / name).read_many(range(400)) for name in ("cache", "whole")]
    for ours, theirs in zip(*readers, strict=True):
        assert_rows_equal(ours, theirs)


def test_a_part_says_what_others_lack(long: list[str | Path], tmp_path: Path) -> None:
    cache = f"teacher.cache={tmp_path / 'cache'}"
    report = _report(start(*long, cache, "--part", "2/4"))
    assert report["rows"] == 400 and report["rows_captured"] == 100 and not report["complete"]
    assert report["missing_samples"] == "0–99, 200–399"
    done = succeed(warm(*long[:-1], cache, "--part", "2/4"))
    assert "0 captured now" in done.stdout and "missing: samples 0–99, 200–399" in done.stdout
    whole = _report(start(*long, cache))
    assert whole["rows_captured"] == 300 and whole["complete"] and whole["missing_samples"] == ""
    for wrong, words in (("0/4", "counted from 1 to 4"), ("5/4", "counted from 1 to 4"), ("x", "such as 2/8")):
        one_error_line(warm(*long, cache, "--part", wrong), f"--part is '{wrong}'", words)


def test_the_same_job_twice_shares_the_work(long: list[str | Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reports = [_report(job) for job in [start(*long, f"teacher.cache={cache}") for _ in range(2)]]
    counts = [int(str(report["rows_captured"])) for report in reports]
    assert sum(counts) == 400 and min(counts) > 40, counts
    assert verify(cache, "deep").ok and not orphans(cache)


def test_the_numbering_is_the_same_in_every_layout(long: list[str | Path], tmp_path: Path) -> None:
    """Six prefixes are scored beforehand, by one rank, shared among two, or by two that split the model."""
    tables = []
    for name, ranks, layout in (("one", 1, []), ("dp2", 2, []), ("tp2", 2, TP2)):
        overrides = [f"teacher.cache={tmp_path / name}", f"cluster.gpus_per_node={ranks}", *layout]
        _report(start(*long, *overrides, "--part", "1/100", ranks=ranks))
        tables.append(open_cache(tmp_path / name).rank_table)
    np.testing.assert_array_equal(tables[1], tables[0])
    # The split model rounds otherwise: at a tie another id may be the last that is kept.
    assert np.mean(tables[2] != tables[0]) < 0.05


KILLS = 5


def test_five_kills_at_random_moments(long: list[str | Path], tmp_path: Path) -> None:
    """SIGKILL of all ranks at exactly five moments of an undisturbed run, one in each fifth of its time; then resumed.

    A moment is some commits and a part of the time to the next one, so that it falls on work however busy the machine.
    """
    cache, seed = tmp_path / "cache", random.randrange(2**32)
    chance = random.Random(seed)
    job = start(*long, f"teacher.cache={tmp_path / 'whole'}", "cluster.gpus_per_node=2", ranks=2)
    times = [_wait_for_commits(tmp_path / "whole", count + 1) for count in range(100)]
    assert _report(job)["rows_captured"] == 400
    kept: dict[str, tuple[int, int]] = {}
    for kill in range(KILLS):
        moment = times[0] + (times[-1] - times[0]) * (kill + 0.9 * chance.random()) / KILLS
        commits = int(np.searchsorted(times, moment, "right"))
        pause = moment - times[commits - 1]
        job = start(*long, f"teacher.cache={cache}", "cluster.gpus_per_node=2", ranks=2)
        _wait_for_attempt(cache, begun=_attempts(cache))
        _wait_for_commits(cache, commits)
        time.sleep(pause)
        for pid in job.pids:
            os.kill(pid, signal.SIGKILL)
        assert [rank.returncode for rank in job.wait(20)] == [-signal.SIGKILL] * 2, f"seed {seed}: it had ended"
        assert kept.items() <= _files(cache).items(), f"seed {seed}: a committed shard was touched"
        kept = _files(cache)
        assert commits <= _commits(cache) < 100, f"seed {seed}: kill {kill} did not fall on work"
    done = _commits(cache)
    report = _report(start(*long, f"teacher.cache={cache}", "cluster.gpus_per_node=2", ranks=2))
    assert report["complete"] and report["rows_captured"] == 4 * (100 - done), "only what is missing is done"
    assert kept.items() <= _files(cache).items()
    checked = verify(cache, "deep")
    assert checked.ok and checked.rows_committed == 400, checked.problems
    readers = [CacheReader(tmp_path / name).read_many(range(400)) for name in ("cache", "whole")]
    for ours, undisturbed in zip(*readers, strict=True):
        assert_rows_equal(ours, undisturbed)


def _attempts(cache: Path) -> set[str]:
    folder = cache / "shards"
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _wait_for_attempt(cache: Path, begun: set[str]) -> None:
    deadline = time.monotonic() + 60
    while _attempts(cache) <= begun:
        assert time.monotonic() < deadline, "no shard was begun in a minute"
        time.sleep(0.001)


def _files(cache: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every file of the committed shards, and of their records."""
    found = {}
    for record in (cache / "commits").glob("*.json"):
        attempt = cache / "shards" / json.loads(record.read_text())["attempt"]
        for path in (record, *(path for path in attempt.rglob("*") if path.is_file())):
            found[str(path)] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@LAYOUTS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_stop_it_leaves_what_is_done(
    long: list[str | Path], tmp_path: Path, layout: list[str], number: int
) -> None:
    cache = tmp_path / "cache"
    job = start(*long, f"teacher.cache={cache}", "cluster.gpus_per_node=2", *layout, ranks=2)
    _wait_for_commits(cache, 5)
    told = time.monotonic()
    os.kill(job.pids[1], number)  # one rank only: all have to agree
    report = _report(job)
    assert time.monotonic() - told < 5
    assert report["stopped"] and not report["complete"] and report["missing_samples"]
    done = committed_shards(cache)
    assert 5 <= len(done) < 100 and report["rows_captured"] == 4 * len(done)
    assert not orphans(cache), "the shard that was begun is taken away"
    assert all("never committed" in problem for problem in verify(cache, "deep").problems)
    rest = _report(start(*long, f"teacher.cache={cache}"))
    assert rest["complete"] and rest["rows_captured"] == 4 * (100 - len(done)) and not rest["stopped"]


@LAYOUTS
def test_a_rank_that_dies_ends_the_others(long: list[str | Path], tmp_path: Path, layout: list[str]) -> None:
    cache = tmp_path / "cache"
    job = start(*long, f"teacher.cache={cache}", "cluster.gpus_per_node=2", *layout, ranks=2)
    _wait_for_commits(cache, 3)
    killed = time.monotonic()
    os.kill(job.pids[1], signal.SIGKILL)
    survivor, dead = job.wait(30)
    assert time.monotonic() - killed < 10 and dead.returncode == -signal.SIGKILL
    one_error_line(survivor, "a rank of this job died or no longer answers")
    assert all("never committed" in problem for problem in verify(cache, "deep").problems)


@LAYOUTS
def test_a_disk_that_refuses_one_rank_ends_all(long: list[str | Path], tmp_path: Path, layout: list[str]) -> None:
    """A limit on the size of a file, set on the running rank that writes; shards are far larger than it."""
    cache = tmp_path / "cache"
    overrides = [f"teacher.cache={cache}", "cluster.gpus_per_node=2", *layout, "teacher.capture.rows_per_shard=200"]
    job = start(*long, *overrides, ranks=2)
    started = time.monotonic()
    resource.prlimit(job.pids[0], resource.RLIMIT_FSIZE, (30_000, 30_000))
    failed, other = job.wait(60)
    assert time.monotonic() - started < 30
    one_error_line(failed, "writing shard", "File too large", "Shards already committed stay valid")
    one_error_line(other, f"writing to {cache} failed on another rank; its message says why")
    assert committed_shards(cache) == [] and not orphans(cache)


ON_A_SMALL_DISK = """
    import json, subprocess, sys, time
    from pathlib import Path
    from megatron_kd.cache.store import committed_shards
    from megatron_kd.cache.verify import verify
    from megatron_kd.cache.writer import orphans
    from tests.e2e.road import one_error_line
    from tests.warm import start
    disk, arguments = Path(sys.argv[1]), sys.argv[2:]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", disk], check=True)
    def capture(name, *more):
        overrides = [f"teacher.cache={disk / name}", "cluster.gpus_per_node=2", *more]
        began = time.monotonic()
        ended = start(*arguments, *overrides, ranks=2).wait(60)
        assert time.monotonic() - began < 30
        return ended
    def refused(ended, *words):
        told = [rank for rank in ended if words[0] in rank.stderr]
        for rank in ended:
            one_error_line(rank, *(words if rank in told else ["failed on another rank; its message says why"]))
        assert told, [rank.stderr for rank in ended]
    refused(capture("c"), "No space left on device", "free space", "stay valid")
    done = committed_shards(disk / "c")
    assert 0 < len(done) < 100 and not orphans(disk / "c"), (done, orphans(disk / "c"))
    left = verify(disk / "c", "deep")
    assert not left.damaged_shards and left.missing_samples
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused(capture("c"), "Read-only file system", "choose another path")
    first, second = capture("other")
    one_error_line(first, "Read-only file system", "creating cache", str(disk / "other"))
    one_error_line(second, "creating the cache", "failed on another rank")
    subprocess.run(["mount", "-o", "remount,rw,size=20m", disk], check=True)
    first, second = capture("c")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["rows_captured"] == 4 * (100 - len(done))
    assert verify(disk / "c", "deep").ok
"""


def test_a_full_and_a_read_only_disk(long: list[str | Path], tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    alone = [unshare or "unshare", "-Urm"]
    if unshare is None or subprocess.run([*alone, "mount", "-t", "tmpfs", "none", tmp_path]).returncode:
        pytest.skip("a private mount is not permitted here")
    ended = subprocess.run(
        [*alone, sys.executable, "-c", textwrap.dedent(ON_A_SMALL_DISK), tmp_path, *long],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
