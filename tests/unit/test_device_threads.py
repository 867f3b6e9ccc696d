"""How many threads a rank takes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megatron_kd.config import Recipe
from megatron_kd.models import launch
from tests.unit.megatron_piece import RECIPE


def recipe(ranks: int, threads: int | None) -> Recipe:
    """The piece's recipe on some ranks."""
    changes: dict[str, Any] = {
        "cluster": {"gpus_per_node": ranks},
        "training": {**RECIPE["training"], "global_batch_size": ranks, "threads": threads},
    }
    return Recipe.model_validate(RECIPE | changes)


@pytest.mark.parametrize(
    ("ranks", "threads", "asked", "expected"),
    [
        (1, None, None, 8),
        (4, None, None, 2),
        (16, None, None, 1),
        (1, None, "1", None),  # one rank: somebody said 1
        (4, None, "1", 2),  # four: torchrun did
        (4, None, "3", None),
        (4, 5, "3", 5),
    ],
)
def test_cores_are_shared(
    ranks: int, threads: int | None, asked: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(launch, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    launch.set_threads(recipe(ranks, threads))
    assert chosen == ([] if expected is None else [expected])


def test_cores_are_counted_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= launch.usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert launch.usable_cores() == os.cpu_count()
