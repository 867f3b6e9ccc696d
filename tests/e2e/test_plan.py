"""``megatron-kd plan`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_kd.planning.memory import PARTS
from tests.assets import succeed
from tests.warm import warm


def test_json_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "memory.png"
    done = succeed(
        warm("plan", "recipes/smollm2_cpu.yaml", "cluster.gpu=h200", "--json", "--suggest", "--figure", picture)
    )
    plan = json.loads(done.stdout)
    assert plan["recipe"] == "smollm2_cpu"
    assert plan["parameters"]["teacher"] == 134_515_008 == plan["active_parameters"]["teacher"]
    # The student is whole on its one rank, with nothing but the padding of the vocabulary beside it.
    assert plan["parameters_per_rank"]["student"] == pytest.approx(plan["parameters"]["student"], rel=1e-3)
    memory = plan["memory"]
    assert set(memory["parts_gib"]) == set(PARTS)
    assert sum(memory["parts_gib"].values()) == pytest.approx(memory["total_gib"])
    assert memory["fits"] and memory["total_gib"] < memory["limit_gib"] < memory["gpu_gib"]
    assert memory["worst_stage"] == 0 and memory["host"]["cache_prefetch_gib"] > 0
    time = plan["time"]
    assert sum(time["parts_s"].values()) == pytest.approx(time["step_time_s"])
    assert time["tokens_per_s"] == pytest.approx(240 / time["step_time_s"])
    cache = plan["cache"]
    assert cache["bytes"] == pytest.approx(cache["tokens"] * cache["bytes_per_token"])
    assert cache["tokens"] == 18000 and cache["read_bytes_per_s"] > 0
    assert plan["gpu_hours"]["train"] > 0 and plan["gpu_hours"]["capture"] > 0
    assert plan["suggestions"] and plan["suggestions"][0]["nodes"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "plan needs a recipe"),
        (("recipes/smollm2_cpu.yaml", "--published"), "takes no recipe"),
        (("recipes/none.yaml",), "recipes/none.yaml"),
        (("recipes/smollm2_cpu.yaml", "cluster.gpu=h20"), "cluster.gpu"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = warm("plan", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
