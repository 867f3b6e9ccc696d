"""Doctor: how each check of the environment judges what is wrong with it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.config import Recipe, load_recipe
from megatron_kd.config.load import load_model
from megatron_kd.device.probe import CudaState, GpuState, join_states, parse_csv
from megatron_kd.doctor.check import Check, attempt, fail, ok, warn
from megatron_kd.doctor.disk import check_locks, check_space, check_speed
from megatron_kd.doctor.gpus import check_gpus
from megatron_kd.doctor.launcher import adopt_slurm_ranks, first_host
from megatron_kd.doctor.limits import Limits, check_limits
from megatron_kd.doctor.report import DoctorReport
from megatron_kd.doctor.space import cache_bytes, checkpoint_bytes, nearest_folder
from megatron_kd.doctor.target import Target
from megatron_kd.doctor.versions import check_versions, installed
from megatron_kd.doctor.wandb_login import check_wandb
from megatron_kd.errors import CacheError, LaunchError
from megatron_kd.planning.parameters import whole_model
from tests.assets import ROOT

GOOD: dict[str, str | None] = {
    "python": "3.12.3",
    "torch": "2.13.0a0+g1234",
    "megatron-core": "0.19.2",
    "transformers": "5.24.0",
    "transformer-engine": "2.14.0+abc",
    "triton": "3.7.1",
    "apex": None,
}
CUDA = CudaState("13.0", (13, 1), True, 92000)
GIB = 2**30


def recipe(*overrides: str) -> Recipe:
    """The demo's, with changes."""
    return load_recipe(ROOT / "recipes/smollm2_cpu.yaml", list(overrides))


def on_gpus(gpus: int = 1, name: str = "h100") -> Target:
    """The demo on GPUs of one node."""
    layout = ["training.precision=bf16", f"training.global_batch_size={gpus}"]
    return Target(recipe(f"cluster.gpu={name}", f"cluster.gpus_per_node={gpus}", *layout), name)


def status_of(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_this_environment_is_judged_by_what_is_installed() -> None:
    checks = check_versions(installed(), CUDA, Target(None, "cpu"))
    assert set(status_of(checks).values()) == {"ok"}
    assert [check.found for check in checks if check.name == "apex"] == ["not needed here: no GPU is seen"]


@pytest.mark.parametrize(
    ("changes", "cuda", "name", "status", "words"),
    [
        ({}, CUDA, "torch", "ok", "2.13.0a0"),
        ({"torch": "2.10.1"}, CUDA, "torch", "fail", "2.10.1, needed ≥ 2.11"),
        ({"megatron-core": "0.20.0"}, CUDA, "megatron-core", "fail", "< 0.20"),
        ({"megatron-core": None}, CUDA, "megatron-core", "fail", "not installed"),
        ({"transformer-engine": "2.13.0"}, CUDA, "transformer-engine", "fail", "≥ 2.14"),
        ({"transformer-engine": None}, CUDA, "transformer-engine", "fail", "not installed"),
        ({"apex": "without its CUDA extensions"}, CUDA, "apex", "warn", "CUDA extensions"),
        ({"triton": None}, CUDA, "triton", "warn", "eager"),
        ({}, replace(CUDA, driver=(12, 8)), "cuda-driver", "fail", "driver for up to 12.8"),
        ({}, replace(CUDA, built_for="13.2"), "cuda-driver", "ok", "13.2"),
        ({}, replace(CUDA, driver=None, available=False), "cuda-driver", "fail", "no driver"),
        ({}, replace(CUDA, available=False), "cuda-driver", "fail", "finds no device"),
        ({}, replace(CUDA, built_for=None), "cuda-driver", "fail", "CPUs alone"),
    ],
)
def test_versions(changes: dict[str, str | None], cuda: CudaState, name: str, status: str, words: str) -> None:
    [check] = [check for check in check_versions(GOOD | changes, cuda, on_gpus()) if check.name == name]
    assert check.status == status and words in check.found
    assert bool(check.todo) is (status != "ok")


def test_sinks_need_a_newer_cudnn() -> None:
    sinks = recipe(
        "teacher.model=tiny_gpt_oss", "student.from_teacher=null", "teacher.top_k=10", "cluster.gpu=h100",
        "data.seq_length=16",
    )  # fmt: skip
    for version, status in ((91300, "fail"), (91301, "ok"), (None, "fail")):
        checks = check_versions(GOOD, replace(CUDA, cudnn=version), Target(sinks, "h100"))
        assert status_of(checks)["cudnn"] == status
    old = check_versions(GOOD, replace(CUDA, cudnn=91300), on_gpus())
    assert status_of(old)["cudnn"] == "ok"


def test_gpus_are_joined_with_what_nvidia_smi_prints() -> None:
    free = parse_csv("GPU-1, 143000\nGPU-2, [N/A]\n")
    busy = parse_csv("GPU-1, 4242\nGPU-1, 4243\n")
    assert join_states("NVIDIA H200", 143771 << 20, "GPU-1", free, busy).free_bytes == 143000 << 20
    assert join_states("NVIDIA H200", 1, "GPU-1", free, busy).processes == (4242, 4243)
    assert join_states("NVIDIA H200", 1, "GPU-2", free, busy) == GpuState("NVIDIA H200", 1, None, ())
    assert join_states("NVIDIA H200", 1, "GPU-1", None, None) == GpuState("NVIDIA H200", 1)


H100 = GpuState("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, ())


@pytest.mark.parametrize(
    ("gpus", "name", "status", "words"),
    [
        ([H100] * 2, "gpus", "ok", "2 × NVIDIA H100"),
        ([H100], "gpus", "fail", "gpus_per_node is 2"),
        ([], "gpus", "fail", "none is seen"),
        ([H100] * 2, "gpu-model", "ok", "as in the recipe"),
        ([H100, replace(H100, name="NVIDIA A100-SXM4-80GB")], "gpu-model", "warn", "A100"),
        ([H100, replace(H100, free_bytes=40 * GIB)], "gpu-memory", "fail", "GPU 1 has 40.0 of 80.0 GiB free"),
        ([H100, replace(H100, free_bytes=None)], "gpu-memory", "warn", "nvidia-smi"),
        ([H100, replace(H100, processes=(os.getppid(),))], "gpu-memory", "warn", str(os.getppid())),
        ([H100, replace(H100, processes=(os.getpid(),))], "gpu-memory", "ok", "79.0 GiB"),
        ([H100] * 2 + [replace(H100, free_bytes=0)], "gpu-memory", "ok", "79.0 GiB"),  # beyond what the recipe uses
    ],
)
def test_gpus(gpus: list[GpuState], name: str, status: str, words: str) -> None:
    [check] = [check for check in check_gpus(gpus, on_gpus(2), [os.getpid()]) if check.name == name]
    assert check.status == status and words in check.found


def test_a_cpu_recipe_misses_no_gpu() -> None:
    [check] = check_gpus([], Target(recipe(), "cpu"))
    assert check.status == "ok" and "cluster.gpu is cpu" in check.found


@pytest.mark.parametrize(
    ("limits", "target", "expected"),
    [
        (Limits(64 << 20, 1024, 65536), on_gpus(8), ["fail", "warn", "warn"]),
        (Limits(None, -1, -1), on_gpus(8), ["fail", "ok", "ok"]),
        (Limits(64 << 30, 4096, -1), on_gpus(8), ["ok", "ok", "ok"]),
        (Limits(64 << 20, 1024, 65536), on_gpus(1), ["ok", "warn", "warn"]),
        (Limits(None, 4096, 0), Target(None, "cpu"), ["ok", "ok", "ok"]),
    ],
)
def test_limits(limits: Limits, target: Target, expected: list[str]) -> None:
    assert [check.status for check in check_limits(limits, target)] == expected


def test_disks(tmp_path: Path) -> None:
    assert check_speed(tmp_path, 1 << 20).name == "disk-speed"
    assert check_locks(tmp_path).status == "ok"
    assert check_space(tmp_path, 1 << 20, "checkpoints").status == "ok"
    full = check_space(tmp_path, 1 << 60, "checkpoints")
    assert full.status == "fail" and "checkpoints up to 1073741824.00 GiB" in full.found and full.todo
    assert list(tmp_path.iterdir()) == []
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file"):
        nearest_folder(tmp_path / "file" / "run")


def test_a_disk_that_loses_what_was_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.read
    monkeypatch.setattr("megatron_kd.doctor.disk.os.read", lambda fd, size: bytes(len(read(fd, size))))
    [check] = attempt("disk-speed", "choose another", 5, lambda: check_speed(tmp_path, 1 << 20))
    assert check.status == "fail" and "does not hold what was written" in check.found and str(tmp_path) in check.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["smollm2_135m", "llama31_8b", "gpt_oss_20b", "gpt_oss_120b", "qwen3_8b"])
def test_parameters_are_those_of_the_built_model(name: str, groups: Any) -> None:
    from megatron_kd.models.counts import count_parameters

    model = load_model(name)
    assert whole_model(model) == count_parameters(model, groups).total


def test_space_counts_what_is_kept() -> None:
    small = recipe("training.train_iters=100", "checkpoint.save_interval=null")
    per_parameter = checkpoint_bytes(small) / whole_model(small.student.model)
    assert per_parameter == 16
    many = recipe("training.train_iters=100", "checkpoint.save_interval=10", "checkpoint.keep=3")
    assert checkpoint_bytes(many) == 4 * checkpoint_bytes(small)
    assert cache_bytes(small, None) == 18000 * (100 * 4 + 16)


def test_errors_and_hangs_become_findings() -> None:
    def refuse() -> Check:
        raise CacheError("no cache\nhere")

    def hang() -> Check:
        time.sleep(60)
        return ok("x", "")

    assert attempt("cache", "capture", 5, refuse) == [fail("cache", "no cache here", "capture")]
    [hung] = attempt("disk", "wait", 0.1, hang)
    assert hung.status == "fail" and "no answer in 0 s" in hung.found


def test_slurm_s_ranks_are_taken_over() -> None:
    task = {
        "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0", "MASTER_ADDR": "10.0.0.1",
    }  # fmt: skip
    environ = dict(task)
    adopt_slurm_ranks(environ)
    assert {key: environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
    }  # fmt: skip
    assert environ["MASTER_ADDR"] == "10.0.0.1" and environ["MASTER_PORT"] == "23456"
    for untouched in (task | {"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {}):
        environ = dict(untouched)
        adopt_slurm_ranks(environ)
        assert environ == untouched
    del task["MASTER_ADDR"]
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        adopt_slurm_ranks(task)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[03-05,9],m1", "n03"), ("gpu-a,gpu-b", "gpu-a"), ("n[7,9]", "n7"), ("r1n[2-3]-ib", "r1n2-ib")],
)
def test_the_first_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_the_report_says_once_what_is_well_on_all_nodes() -> None:
    nodes = ["n1", "n2"]
    of_nodes = [ok("torch", "2.13.0").on(node) for node in nodes]
    limits = [ok("open-files", "up to 4096").on("n1"), warn("open-files", "up to 1024", "raise it").on("n2")]
    report = DoctorReport([*of_nodes, *limits, ok("links", "gloo")], 4, nodes)
    text = report.text().splitlines()
    assert [line.split()[:2] for line in text[:-1]] == [
        ["ok", "torch"], ["ok", "open-files"], ["warn", "open-files"], ["ok", "links"],
    ]  # fmt: skip
    assert "2 nodes: 2.13.0" in text[0] and "n2: up to 1024; raise it" in text[2]
    assert text[-1] == "4 ranks on 2 nodes: 0 failed, 1 to look at"
    assert report.ok and len(report.to_json()["checks"]) == 5
    assert not DoctorReport([fail("torch", "none", "install")], 1, ["n1"]).ok


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    online = recipe("logging.wandb={project: p, mode: online}")
    assert check_wandb(None).status == check_wandb(recipe("logging.wandb=null")).status == "ok"
    assert check_wandb(recipe("logging.wandb={project: p}")).found.startswith("offline")
    stranger = check_wandb(online)
    assert stranger.status == "warn" and "nobody is logged in" in stranger.found
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    unreachable = check_wandb(online)
    assert unreachable.status == "warn" and "127.0.0.1:9 does not answer" in unreachable.found
