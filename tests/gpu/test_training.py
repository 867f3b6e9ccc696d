"""The public commands on one GPU: import, prepare, capture, and two steps of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.assets import megatron_kd, steps_of, succeed, tiny_recipe


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two stages need two GPUs")
def test_interleaved_stages_train_as_whole_ones(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200", "gpus_per_node": 2},
        parallelism={"pipeline_model_parallel_size": 2},
        student={"from_teacher": {"ffn_hidden_size": 80}},
        training={"train_iters": 4, "precision": "fp32"},
    )
    alone = ("cluster.gpus_per_node=1", "parallelism.pipeline_model_parallel_size=1")
    for command in (("convert", "import"), ("prepare",), ("capture",)):
        succeed(megatron_kd(*command, recipe, *alone))
    losses = []
    for chunks in ("null", "2"):
        run = tmp_path / f"chunks_{chunks}"
        words = (f"parallelism.virtual_pipeline_model_parallel_size={chunks}", f"run_dir={run}")
        succeed(megatron_kd("train", recipe, *words, ranks=2))
        losses.append([step["loss/kd"] for step in steps_of(run)])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-4)
