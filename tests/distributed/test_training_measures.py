"""What a step is said to cost: counted operations, time and memory by phase, and the trace of a profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from megatron_kd.testing import run_distributed
from tests.assets import steps_of, tiny_recipe
from tests.training_runs import Layout, Trainer, make_inputs, recipe_in

ALONE, PAIR = Layout(1), Layout(2)
FULL = ["training.recompute_granularity=full"]
CASES = {
    "fused": [],
    "recompute": ["loss.mode=recompute"],
    "dense": ["loss.implementation=dense"],
    "forward_chunked": ["loss.implementation=forward_chunked"],
    "online": ["teacher.mode=online"],
    "online, recompute": ["teacher.mode=online", "loss.mode=recompute"],
    "online, dense": ["teacher.mode=online", "loss.implementation=dense"],
    "online, top_k": ["teacher.mode=online", "teacher.targets=top_k"],
    "layers recomputed": FULL,
    "one layer recomputed": [*FULL, "training.recompute_method=block", "training.recompute_num_layers=1"],
    "attention recomputed": ["training.recompute_granularity=selective"],
}


def _counted(trainer: Trainer) -> dict[str, float]:
    """(operations that torch counts in a step, operations we say are executed) of a trainer's next step."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_kd.bench.measure import count_flops
    from megatron_kd.models.flops import mean_context
    from megatron_kd.models.step_flops import step_flops

    done: dict[str, float] = {}
    # The fused attention of the CPU is not counted; the plain one computes the same with matrix products.
    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(lambda: done.update(trainer.step()))
    recipe = trainer.recipe
    positions = recipe.training.global_batch_size * recipe.data.seq_length
    length = recipe.data.seq_length

    def upper_half(model: Any) -> float:
        """The plain attention multiplies whole squares."""
        q = model.num_attention_heads * model.kv_channels
        return model.num_layers * 4 * q * (length - mean_context(length, None))

    passes = 3.0
    if recipe.training.recompute_granularity is not None:
        passes += 0.5 if recipe.training.recompute_method == "block" else 1
    extra = passes * upper_half(recipe.student.model)
    extra += upper_half(recipe.teacher.model) if recipe.teacher.mode == "online" else 0
    flops = step_flops(recipe, int(done["tokens"]))
    return {"counted": counted, "ours": flops.executed + positions * extra, "model": flops.student / positions}


def _spent(run_dir: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    traces = {}
    for path in sorted((run_dir / "profile").glob("*")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        traces[path.name] = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return {"lines": lines, "steps": steps_of(run_dir), "traces": traces}


def _rank(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    from megatron_kd.training.loop import train
    from tests.training_runs import leave_layout

    make_inputs(recipe_in(recipe, ALONE))
    found: dict[str, Any] = {
        name: _counted(Trainer(recipe_in(recipe, ALONE, *overrides))) for name, overrides in CASES.items()
    }
    run = recipe.parent / "online_run"
    words = [f"run_dir={run}", "name=online_run", "teacher.mode=online", "training.eval_interval=2"]
    window = ["profile.step_start=1", "profile.step_end=4", "checkpoint.save_interval=2"]
    for iterations in (3, 5):  # the second goes on within the window
        leave_layout()
        train(recipe_in(recipe, ALONE, *words, *window, f"training.train_iters={iterations}"), show_progress=False)
    return {**found, "run": _spent(run)}


def _pair(rank: int, world: int, recipe: Path) -> dict[str, Any]:
    from megatron_kd.training.loop import train

    train(recipe_in(recipe, PAIR, "training.train_iters=3", "profile.step_start=0", "profile.ranks=[1]"))
    dist.barrier()  # the other rank writes its trace last
    return _spent(recipe.parent / "run")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("measures"))


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    return run_distributed(_rank, 1, recipe)[0]


@pytest.fixture(scope="module")
def pair(recipe: Path, found: dict[str, Any]) -> dict[str, Any]:
    return run_distributed(_pair, 2, recipe)[0]


@pytest.mark.parametrize("name", CASES)
def test_executed_operations_are_those_that_torch_counts(name: str, found: dict[str, Any]) -> None:
    assert found[name]["counted"] == pytest.approx(found[name]["ours"], rel=1e-12)
    assert found[name]["model"] == found["fused"]["model"]  # whatever the method


def test_every_method_costs_something_of_its_own(found: dict[str, Any]) -> None:
    cost = {name: case["counted"] for name, case in found.items() if name in CASES}
    assert cost["fused"] < cost["dense"] == cost["forward_chunked"]  # masked rows are left out by fused alone
    assert cost["fused"] < cost["recompute"] and cost["online"] < cost["online, recompute"]
    assert cost["fused"] < cost["attention recomputed"] < cost["one layer recomputed"] < cost["layers recomputed"]


def test_phases_add_up_to_the_step(found: dict[str, Any]) -> None:
    phases = ("data", "teacher", "forward_backward", "gradients", "optimizer")
    shares = []
    for step in found["run"]["steps"]:
        parts = [step[f"time/{name}_s"] for name in phases]
        assert all(part > 0 for part in parts)
        shares.append(sum(parts) / step["perf/step_time_s"])
        peaks = [step[f"memory/peak_{name}_gib"] for name in phases]
        assert min(peaks) > 0.1 and max(peaks) <= step["memory/peak_gib"]
        assert step["perf/tflops_per_gpu"] < step["perf/tflops_per_gpu_with_teacher"]
    assert median(shares) > 0.9 and max(shares) <= 1


def test_what_lies_between_steps_has_lines_of_its_own(found: dict[str, Any]) -> None:
    lines = found["run"]["lines"]
    assert [line["iteration"] for line in lines if "time/checkpoint_s" in line] == [2, 3, 4, 5]
    evaluated = [line for line in lines if "eval/kd" in line]
    assert [line["iteration"] for line in evaluated] == [0, 2, 3, 4, 5]
    assert all(line["time/evaluation_s"] > 0 and line["memory/peak_evaluation_gib"] > 0.1 for line in evaluated)


def test_a_profile_goes_on_after_a_stop(found: dict[str, Any]) -> None:
    traces = found["run"]["traces"]
    assert list(traces) == ["iter_0000002_0000003_rank_0.json.gz", "iter_0000004_0000004_rank_0.json.gz"]
    first, second = traces.values()
    steps = {"data", "teacher", "forward_backward", "gradients", "optimizer"}
    assert steps <= second and "iteration 4" in second and "iteration 3" not in second
    assert {*steps, "checkpoint", "evaluation", "iteration 2", "iteration 3"} <= first


def test_offline_on_two_ranks(pair: dict[str, Any]) -> None:
    step = pair["steps"][-1]
    assert "time/teacher_s" not in step and "memory/peak_teacher_gib" not in step
    assert 1.0 <= step["time/imbalance"] <= 2.0
    assert list(pair["traces"]) == ["iter_0000001_0000003_rank_1.json.gz"]
