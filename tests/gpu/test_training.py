"""The public commands on one GPU: import, prepare, capture, and two steps of training."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.assets import environment, megatron_kd, steps_of, succeed, tiny_recipe


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


def test_memory_that_runs_out_leaves_a_snapshot(tmp_path: Path) -> None:
    """A real allocation that fails, in a process that may use very little of the device."""
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200"},
        data={"seq_length": 48, "train_tokens": 4800},
        training={"train_iters": 2, "precision": "bf16", "memory_snapshot": True},
        optimizer={"lr_warmup_iters": 1},
    )
    succeed(megatron_kd("convert", "import", recipe))
    for command in ("prepare", "capture"):
        succeed(megatron_kd(command, recipe))
    # 14 MiB of 139 GiB: the allocator asks for 20 MiB as soon as a tensor has more than 1 MiB.
    limited = "import torch; torch.cuda.set_per_process_memory_fraction(1e-4); from megatron_kd.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", limited, "train", str(recipe)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "out of memory in phase " in line and "reserved" in line and "memory_rank_0.pickle" in line
    snapshot = tmp_path / "run/logs/memory_rank_0.pickle"
    assert {"segments", "device_traces"} <= pickle.loads(snapshot.read_bytes()).keys()


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
