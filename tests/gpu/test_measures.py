"""Time, memory and traces on a GPU: events that add up, the allocator's peaks, kernels in the profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median

from tests.assets import ROOT, megatron_kd, steps_of, succeed, tiny_recipe

PHASES = ("data", "teacher", "forward_backward", "gradients", "optimizer")


def test_phases_of_an_online_run_and_its_profile(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200"},
        teacher={"mode": "online"},
        training={"train_iters": 6, "precision": "bf16"},
        profile={"step_start": 4, "step_end": 5},
    )
    succeed(megatron_kd("convert", "import", recipe))
    for command in ("prepare", "train"):
        succeed(megatron_kd(command, recipe))
    steps = steps_of(tmp_path / "run")
    shares = [sum(step[f"time/{name}_s"] for name in PHASES) / step["perf/step_time_s"] for step in steps]
    assert 0.9 < median(shares) < 1.02
    for step in steps:
        peaks = [step[f"memory/peak_{name}_gib"] for name in PHASES]
        assert min(peaks) > 0 and max(peaks) <= step["memory/peak_gib"]
        assert peaks[PHASES.index("forward_backward")] > peaks[PHASES.index("data")]
        assert 0 < step["perf/mfu"] < 1 and step["perf/hfu"] != step["perf/mfu"]
    (trace,) = (tmp_path / "run" / "profile").glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert set(PHASES) <= {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert any(event.get("cat") == "kernel" for event in events)


def test_marks_for_nsight_do_not_disturb_a_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        cluster={"gpu": "h200"},
        training={"train_iters": 3},
        profile={"profiler": "nsys", "step_start": 1, "step_end": 2},
    )
    succeed(megatron_kd("convert", "import", recipe))
    for command in ("prepare", "capture", "train"):
        succeed(megatron_kd(command, recipe))
    assert len(steps_of(tmp_path / "run")) == 3


def test_a_step_by_cross_entropy_and_by_distillation() -> None:
    """With the vocabulary of GPT-OSS; the ratio of their times belongs into docs/measurements.md."""
    words = ["teacher.model.vocab_size=201088", "cluster.gpu=h200", "training.precision=bf16"]
    words += ["training.global_batch_size=16", "training.micro_batch_size=16"]
    done = succeed(megatron_kd("bench", "step", ROOT / "recipes/bench_step.yaml", *words, "--json"))
    plain, fused = json.loads(done.stdout)["results"]
    assert (plain["method"], fused["method"]) == ("cross_entropy", "fused")
    assert fused["ratio"] > 0 and fused["peak_gib"] < plain["peak_gib"]
