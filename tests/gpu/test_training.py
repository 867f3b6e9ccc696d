"""The public commands on one GPU: import, prepare, capture, and two steps of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.assets import megatron_kd, succeed, tiny_recipe


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_tiny_recipe_trains(tmp_path: Path, precision: str) -> None:
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200"},
        training={"train_iters": 2, "precision": precision},
        optimizer={"lr_warmup_iters": 1},
        checkpoint={"save_interval": 2},
    )
    succeed(megatron_kd("convert", "import", recipe))
    for command in ("prepare", "capture", "train"):
        succeed(megatron_kd(command, recipe))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss/kd"] for record in records if "loss/kd" in record]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
    assert all(record["memory/peak_gib"] > 0 for record in records if "memory/peak_gib" in record)
    assert (tmp_path / "run" / "checkpoints" / "iter_0000002" / "model.json").exists()
