"""Reading the cache in runs as users start them: subsets, samples found by their hash, waiting, a disk that fails."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

import pytest

from tests.assets import steps_of, succeed
from tests.e2e.road import captured_road, one_error_line
from tests.training_runs import losses_of
from tests.warm import start, warm

HALF = "data.train_tokens=1200"  # 25 of the 50 rows


@pytest.fixture(scope="module")
def road() -> Path:
    return captured_road()


@pytest.fixture(scope="module")
def recipe(road: Path) -> Path:
    return road / "recipe.yaml"


def test_a_subset_is_the_same_from_smaller_samples(road: Path, recipe: Path, tmp_path: Path) -> None:
    """Half the rows of the samples, and samples prepared with half as many rows, read from the cache of all."""
    short = ["training.train_iters=16", "checkpoint.save_interval=null", "training.eval_interval=8"]
    succeed(warm("train", recipe, f"run_dir={tmp_path / 'all'}", *short))
    succeed(warm("train", recipe, f"run_dir={tmp_path / 'half'}", HALF, *short))
    smaller = f"data.samples={tmp_path / 'samples'}"
    succeed(warm("prepare", recipe, smaller, HALF))
    succeed(warm("train", recipe, f"run_dir={tmp_path / 'smaller'}", smaller, HALF, *short))
    curves = [losses_of(steps_of(tmp_path / name)) for name in ("all", "half", "smaller")]
    assert curves[1] == curves[2] != curves[0]
    evaluations = [sorted((tmp_path / name / "evaluations").iterdir()) for name in ("half", "smaller")]
    kd = [[_kd(file) for file in files] for files in evaluations]
    assert len(kd[0]) == 3 and kd[0] == kd[1]

    # A run keeps its rows; more of them than there are is a mistake.
    done = warm("train", recipe, f"run_dir={tmp_path / 'half'}", "training.train_iters=18")
    one_error_line(done, "data.train_tokens 1200", "2400", "another run_dir")
    done = warm("train", recipe, f"run_dir={tmp_path / 'more'}", "data.train_tokens=4800")
    one_error_line(done, "data.train_tokens 4800 is 100 rows", "has 50", str(road / "samples"), "prepare more rows")
    assert not (tmp_path / "more").exists()


def _kd(evaluation: Path) -> str:
    return next(line for line in evaluation.read_text().splitlines() if '"eval/kd"' in line)


def test_the_step_does_not_wait_for_its_targets(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed(warm("train", recipe, f"run_dir={run}", "training.train_iters=30", "checkpoint.save_interval=null"))
    steps = steps_of(run)
    waits = [step["data/cache_wait_s"] for step in steps]
    assert statistics.median(waits) < 0.05 * statistics.median(step["perf/step_time_s"] for step in steps)
    assert all(0 <= wait <= step["perf/step_time_s"] for wait, step in zip(waits, steps, strict=True))


def test_how_rows_are_read_ahead_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    """Also midway: a run goes on with other settings of the reading."""
    curves = []
    for name, first, second in (("few", (1, 1), (1, 1)), ("many", (7, 16), (2, 3))):
        run = [f"run_dir={tmp_path / name}", "training.eval_interval=4"]
        for iterations, (batches, workers) in ((4, first), (8, second)):
            reading = [f"data.prefetch_batches={batches}", f"data.num_workers={workers}"]
            succeed(warm("train", recipe, *run, *reading, f"training.train_iters={iterations}"))
        curves.append(losses_of(steps_of(tmp_path / name)))
    assert curves[0] == curves[1] and len(curves[0]) == 8


def test_a_disk_that_fails_while_two_ranks_train(road: Path, recipe: Path, tmp_path: Path) -> None:
    """The whole cache turns bad under the run: each rank exits with a line that names a sample, in seconds."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    shutil.copytree(road / "cache", cache)
    endless = [
        "training.train_iters=100000",
        "checkpoint.save_interval=null",
        "optimizer.lr=1e-5",
        "optimizer.min_lr=0",
    ]
    ranks = start(
        "train", recipe, "cluster.gpus_per_node=2", f"teacher.cache={cache}", f"run_dir={run}", *endless, ranks=2
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((run / "metrics.jsonl").exists() and len(steps_of(run)) > 3):
        time.sleep(0.01)
    for file in cache.glob("shards/*/*/c.*"):
        with open(file, "r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    began = time.monotonic()
    done = ranks.wait(60)
    assert time.monotonic() - began < 20
    lines = [one_error_line(rank) for rank in done]
    assert any("sample" in line and str(cache) in line and "cache verify" in line for line in lines)
    for line in lines:
        assert str(cache) in line or "on another rank; its message says why" in line
    steps = steps_of(run)
    assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1))
    (kept,) = (run / "checkpoints").iterdir()
    assert kept.name == f"iter_{len(steps):07d}"
    # The same run, its cache whole again.
    more = ["training.train_iters=" + str(len(steps) + 2), *endless[1:]]
    done = warm("train", recipe, f"teacher.cache={road / 'cache'}", f"run_dir={run}", *more)
    succeed(done)
    assert len(steps_of(run)) == len(steps) + 2
