"""What the ranks of a capture agree on: answers of the first rank, failures, sums, lost ranks, the probe's counts."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.testing import RankFailedError, run_distributed
from tests.assets import tiny_recipe


def answers_rank(rank: int, world: int, folder: str) -> list[Any]:
    """Answers of several kinds; each is asked on the first rank alone."""
    from megatron_kd.device import first_rank_tells, sum_over_ranks
    from megatron_kd.errors import CacheError, RemoteRankError

    def ask(value: Any) -> Any:
        (Path(folder) / f"asked_by_{rank}").touch()
        return value

    values = (None, 0, "a", (7, [1, 2]), range(3))
    told = [first_rank_tells("asking", functools.partial(ask, value)) for value in values]

    def refuse() -> None:
        raise CacheError("the first rank's own message")

    try:
        first_rank_tells("looking", refuse)
    except (CacheError, RemoteRankError) as error:
        told.append(f"{type(error).__name__}: {error}")
    try:  # not an Exception, as what pytest or a library ends a thread with
        first_rank_tells("leaving", lambda: sys.exit("the first rank leaves"))
    except (SystemExit, RemoteRankError) as error:
        told.append(f"{type(error).__name__}: {error}")
    told.append(first_rank_tells("asking after a failure", lambda: rank))
    told.append(sum_over_ranks([rank, 2**61 + rank, -rank]))
    return told


def test_the_first_rank_tells_all(tmp_path: Path) -> None:
    first, *others = run_distributed(answers_rank, 3, str(tmp_path))
    expected = [None, 0, "a", (7, [1, 2]), range(3)]
    assert first[:5] == expected and first[5] == "CacheError: the first rank's own message"
    assert first[6:] == ["SystemExit: the first rank leaves", 0, [3, 3 * 2**61 + 3, -3]]
    for told in others:
        assert told[:5] == expected and told[7:] == first[7:]
        assert told[5] == "RemoteRankError: looking failed on another rank; its message says why"
        assert told[6] == "RemoteRankError: leaving failed on another rank; its message says why"
    assert [path.name for path in tmp_path.iterdir()] == ["asked_by_0"]


def be_impatient(rank: int, world: int, rendezvous: str) -> None:
    """From now on collectives wait for seconds only."""
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=4)
    )


def slow_rank(rank: int, world: int, rendezvous: str) -> str:
    """An answer that takes longer than any collective may wait."""
    from megatron_kd.device import first_rank_tells

    be_impatient(rank, world, rendezvous)

    def ponder() -> str:
        time.sleep(7)
        return "done"

    return first_rank_tells("pondering", ponder)


def test_an_answer_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    assert run_distributed(slow_rank, 2, str(tmp_path / "rendezvous")) == ["done", "done"]


def slowly_hashed_rank(rank: int, world: int, rendezvous: str, recipes: list[Path]) -> list[dict[str, Any]]:
    """The first rank takes longer to hash the weights than any collective may wait."""
    from megatron_kd.config import load_recipe
    from megatron_kd.teacher import hf_loading, vllm_engine
    from megatron_kd.teacher.engine import open_teacher
    from tests.unit import test_teacher_vllm

    be_impatient(rank, world, rendezvous)
    exact = hf_loading.weights_sha256

    def slowly(weights: Any) -> str:
        time.sleep(7)
        return f"{exact(weights)} by {rank}"

    hf_loading.weights_sha256 = vllm_engine.weights_sha256 = slowly
    sys.modules["vllm"] = test_teacher_vllm.imitation()
    return [open_teacher(load_recipe(recipe), None).identity() for recipe in recipes]  # type: ignore[arg-type]


def test_hashing_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    recipes = []
    for engine in ("hf", "vllm"):
        (tmp_path / engine).mkdir()
        teacher = {"engine": engine, "checkpoint": None, "temperatures": [1.0]}
        recipes.append(tiny_recipe(tmp_path / engine, teacher=teacher, cluster={"gpus_per_node": 2}))
    first, second = run_distributed(slowly_hashed_rank, 2, str(tmp_path / "rendezvous"), recipes)
    assert first == second and [identity["engine"] for identity in first] == ["hf", "vllm"]
    assert {identity["weights_sha256"][64:] for identity in first} == {" by 0"}


def dying_rank(rank: int, world: int, own_group: bool) -> str:
    """One rank dies while the others wait for an answer, or for a sum."""
    import torch.distributed as dist

    from megatron_kd.device import init_distributed, lost_ranks_reported, sum_over_ranks
    from megatron_kd.errors import RemoteRankError

    if own_group:
        init_distributed()
        # What other collectives are on their way stays with the default group, as nccl's would.
        pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        assert pending is None or not pending.is_completed()
    sum_over_ranks([1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RemoteRankError, match="died or no longer answers"):
        sum_over_ranks([1])
    with pytest.raises(RuntimeError, match="out of memory"), lost_ranks_reported():
        raise RuntimeError("out of memory")
    Path(os.environ["MEGATRON_KD_TEST_FOLDER"], f"{rank}").touch()
    return "survived"


@pytest.mark.parametrize("own_group", [False, True])
def test_a_dead_rank_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_group: bool) -> None:
    monkeypatch.setenv("MEGATRON_KD_TEST_FOLDER", str(tmp_path))
    with pytest.raises(RankFailedError, match="rank 1 of 2 died with exit code -9"):
        run_distributed(dying_rank, 2, own_group)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def probe_rank(rank: int, world: int, recipe_path: Path, overrides: list[str]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The probe's counts, and the ids of the same prefixes scored one by one."""
    import torch

    from megatron_kd.config import load_recipe
    from megatron_kd.data.samples import open_samples
    from megatron_kd.models.launch import join_ranks
    from megatron_kd.teacher.engine import open_teacher
    from megatron_kd.teacher.rank_probe import count_scored_ids, probe_plan
    from tests.training_runs import prepare_rows

    recipe = load_recipe(recipe_path, overrides)
    groups = join_ranks(recipe)
    if rank == 0:
        prepare_rows(recipe, masked=False)
    torch.distributed.barrier()
    samples, teacher = open_samples(recipe.data.samples), open_teacher(recipe, groups)
    scored = count_scored_ids(recipe, samples, teacher, groups)
    chosen, prefix = probe_plan(len(samples), samples.seq_length)
    alone = [teacher.top_k(torch.from_numpy(samples.rows([i]).tokens[:, :prefix]).long()) for i in chosen]
    return scored, [one.targets.ids.numpy() for one in alone if one is not None]


@pytest.mark.parametrize("step", [1, 3])
def test_ranks_share_the_probe(tmp_path: Path, step: int) -> None:
    recipe = tiny_recipe(
        tmp_path,
        data={"train_tokens": 48 * 400, "heldout_tokens": None},
        teacher={"engine": "hf", "checkpoint": None},
        cluster={"gpus_per_node": 2},
    )
    found = run_distributed(probe_rank, 2, recipe, [f"teacher.capture.micro_batch_size={step}"])
    for scored, alone in found:
        assert len(alone) == 6, "a sixty-fourth of 400 rows of 48 positions"
        np.testing.assert_array_equal(scored, np.sort(np.concatenate([ids.ravel() for ids in alone])))
