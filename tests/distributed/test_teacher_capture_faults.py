"""What one rank of a capture alone fails at: all ranks end together, one says why, and what is published is whole.

Each rank has a copy of the samples of its own, as on the disk of its node.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import orphans
from megatron_kd.errors import ConfigError, RemoteRankError
from megatron_kd.testing import RankFailedError, run_distributed
from tests.assets import tiny_recipe
from tests.training_runs import Layout, leave_layout, prepare_rows, recipe_in

BAD_RANK, COMMITS, PATIENCE_S = 1, 3, 30.0
HF = ("teacher.engine=hf", "teacher.checkpoint=null")


def truncate(tokens: Path) -> None:
    """The end of the file is cut off."""
    os.truncate(tokens, 4096)


def spoil(tokens: Path) -> None:
    """Every token becomes one that the teacher does not know."""
    array = np.load(tokens, mmap_mode="r+")
    array[:] = 2**30
    array.flush()


def in_the_middle(cache: Path, damage: Callable[[], None]) -> None:
    """Once some shards are committed."""
    deadline = time.monotonic() + PATIENCE_S
    while len(list(cache.glob("commits/*.json"))) < COMMITS and time.monotonic() < deadline:
        time.sleep(0.001)
    damage()


def capture_fails(
    rank: int, recipe: Path, name: str, layout: Layout, damage: Callable[[Path], None], *, at_once: bool = False
) -> dict[str, Any]:
    """One capture, with what one rank finds damaged on its disk."""
    from megatron_kd.teacher.capture import capture

    samples, cache = recipe.parent / f"samples_{name}_{rank}", recipe.parent / f"cache_{name}"
    shutil.copytree(recipe.parent / "samples", samples)
    leave_layout()
    loaded = recipe_in(
        recipe, layout, f"data.samples={samples}", f"teacher.cache={cache}", *(() if layout.tp > 1 else HF)
    )
    spoiler = threading.Thread(target=in_the_middle, args=(cache, lambda: damage(samples / "tokens.npy")))
    if rank == BAD_RANK and at_once:
        damage(samples / "tokens.npy")
    elif rank == BAD_RANK:
        spoiler.start()
    began = time.monotonic()
    try:
        outcome = ("ended well", str(capture(loaded, show_progress=False)))
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    took = time.monotonic() - began
    if rank == BAD_RANK and not at_once:
        spoiler.join()
    return {"outcome": outcome, "seconds": took, "samples": samples, "cache": cache}


def _rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    from megatron_kd.models.convert import import_model

    if world == 1:
        alone = recipe_in(recipe, Layout(1))
        import_model(alone, "teacher", show_progress=False)
        prepare_rows(alone, masked=False)
        return {}
    dp2, tp2 = Layout(2), Layout(2, tp=2, sp=True)
    return {
        "read_dp2": capture_fails(rank, recipe, "read_dp2", dp2, truncate),
        "read_tp2": capture_fails(rank, recipe, "read_tp2", tp2, truncate),
        "score": capture_fails(rank, recipe, "score", dp2, spoil),
        "probe": capture_fails(rank, recipe, "probe", dp2, spoil, at_once=True),
    }


def _split_rank(rank: int, world: int, recipe: Path) -> None:
    """A forward pass that two ranks share fails on one of them, which then ends as the command does."""
    from megatron_kd.teacher.capture import capture
    from megatron_kd.teacher.megatron_engine import MegatronTeacher

    cache = recipe.parent / "cache_split"
    exact = MegatronTeacher.top_k_of

    def runs_out_of_memory(self: MegatronTeacher, *arguments: Any) -> Any:
        if len(list(cache.glob("commits/*.json"))) >= COMMITS:
            raise MemoryError("no more of it")
        return exact(self, *arguments)

    if rank == BAD_RANK:
        MegatronTeacher.top_k_of = runs_out_of_memory  # type: ignore[assignment, method-assign]
    began = time.monotonic()
    try:
        capture(recipe_in(recipe, Layout(2, tp=2, sp=True), f"teacher.cache={cache}"), show_progress=False)
    except (RemoteRankError, ConfigError) as error:
        took = time.monotonic() - began
        (recipe.parent / f"said_{rank}").write_text(f"{took < PATIENCE_S} {type(error).__name__}: {error}")
        os._exit(2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("faults"),
        data={"train_tokens": 48 * 400, "heldout_tokens": None},
        teacher={"capture": {"rows_per_shard": 4, "micro_batch_size": 2}},
    )
    run_distributed(_rank, 1, recipe)
    return recipe


@pytest.fixture(scope="module")
def found(recipe: Path) -> list[dict[str, Any]]:
    return run_distributed(_rank, 2, recipe, timeout_s=200.0)


@pytest.mark.parametrize(
    ("name", "kind", "words", "work"),
    [
        ("read_dp2", "DataError", "tokens.npy is truncated", "reading the samples"),
        ("read_tp2", "DataError", "tokens.npy is truncated", "reading the samples"),
        ("score", "IndexError", "index out of range", "scoring"),
        ("probe", "IndexError", "index out of range", "scoring"),
    ],
)
def test_all_ranks_end_together(found: list[dict[str, Any]], name: str, kind: str, words: str, work: str) -> None:
    good, bad = (rank[name] for rank in found)
    assert bad["outcome"][0] == kind and words in bad["outcome"][1], bad["outcome"]
    assert good["outcome"] == ("RemoteRankError", f"{work} failed on another rank; its message says why")
    assert max(good["seconds"], bad["seconds"]) < PATIENCE_S
    if name == "probe":
        assert not good["cache"].exists()
        return
    report = verify(good["cache"], "deep")
    assert not report.damaged_shards and report.missing_samples and not orphans(good["cache"])
    assert report.shards_committed >= COMMITS


def test_a_pass_that_fails_on_one_of_the_ranks_that_share_it(recipe: Path) -> None:
    with pytest.raises(RankFailedError):
        run_distributed(_split_rank, 2, recipe)
    good, bad = ((recipe.parent / f"said_{rank}").read_text() for rank in range(2))
    assert bad.startswith("True ConfigError: scoring 2 rows of 48 tokens ran out of memory (no more of it): lower")
    assert good.startswith("True RemoteRankError: a rank of this job died or no longer answers")
    report = verify(recipe.parent / "cache_split", "deep")
    assert report.shards_committed >= COMMITS and not report.damaged_shards and report.missing_samples
