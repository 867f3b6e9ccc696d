"""Doctor on a real road: what a recipe reads, several ranks, one that never comes and one that dies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.doctor.check import Check
from megatron_kd.doctor.inputs import (
    check_cache_of,
    check_checkpoints_of,
    check_mounts,
    check_samples_of,
    check_tokenizer_of,
    visible_paths,
)
from tests.assets import ROOT
from tests.e2e.road import captured_road
from tests.unit.cache_object_server import BUCKET, object_server
from tests.unit.data_tokenizers import bpe, write_folder
from tests.warm import start, warm


def by_name(checks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in checks}


def test_a_bare_installation_is_well() -> None:
    done = warm("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"] and report["ranks"] == 1 and len(report["nodes"]) == 1, done.stdout
    checks = by_name(report["checks"])
    assert {"python", "torch", "megatron-core", "losses-fp32", "losses-bf16", "open-files"} <= set(checks)
    assert set(checks["torch"]) == {"name", "status", "found", "todo", "node"}
    assert "fused (single_pass, recompute, frozen_head, no_grad)" in checks["losses-fp32"]["found"]


def test_a_recipe_that_can_be_trained(tmp_path: Path) -> None:
    done = warm("doctor", captured_road() / "recipe.yaml", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()[:-1]} == {"ok"}
    assert "fits the recipe" in done.stdout and f"{tmp_path}: writes" in done.stdout
    assert f"{tmp_path}: locks and links work" in done.stdout and list(tmp_path.iterdir()) == []
    assert done.stdout.splitlines()[-1] == "1 rank on 1 node: all is well"


def test_a_fresh_recipe_is_told_what_comes_first(tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes/smollm2_cpu_tp3.yaml")
    places = [f"data.samples={tmp_path / 's'}", f"teacher.cache={tmp_path / 'c'}", f"teacher.checkpoint={tmp_path}/t"]
    done = warm("doctor", recipe, *places, f"run_dir={tmp_path / 'run'}", "data.tokenizer=/nowhere", "--quick")
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    for name, command in (("samples", "prepare"), ("cache", "prepare"), ("teacher-checkpoint", "convert import")):
        assert lines[name].startswith("fail") and f"megatron-kd {command} {recipe}" in lines[name], lines[name]
    assert lines["tokenizer"].startswith("fail") and "/nowhere" in lines["tokenizer"]
    assert lines["ranks"].startswith("warn") and "--nproc-per-node 3 megatron-kd doctor" in lines["ranks"]
    assert "losses-fp32" not in lines and "disk-speed" not in lines


def test_what_is_wrong_with_the_inputs_is_found(tmp_path: Path) -> None:
    road = captured_road()

    def judge(check: Callable[..., Any], *overrides: str) -> list[Check]:
        loaded = load_recipe(road / "recipe.yaml", list(overrides))
        found = check(loaded) if check is check_tokenizer_of else check(loaded, "r.yaml")
        return [found] if isinstance(found, Check) else list(found)

    def refuses(check: Callable[..., Any], words: str, *overrides: str) -> None:
        [found] = [found for found in judge(check, *overrides) if found.status == "fail"]
        assert words in found.found and found.todo, found

    for check in (check_samples_of, check_tokenizer_of, check_cache_of, check_checkpoints_of):
        assert {found.status for found in judge(check)} == {"ok"}
    none = tmp_path / "none"
    refuses(check_samples_of, "no samples.json", f"data.samples={none}")
    refuses(check_samples_of, "data.seq_length is 32", "data.seq_length=32")
    refuses(check_samples_of, "has 50 to train on", "data.train_tokens=4800")
    refuses(check_tokenizer_of, "is another one than", f"data.tokenizer={write_folder(tmp_path / 'words', bpe())}")
    refuses(check_cache_of, "is not a cache", f"teacher.cache={none}")
    refuses(check_cache_of, "keeps 20 tokens", "teacher.top_k=21")
    refuses(check_cache_of, "was captured at the temperatures", "teacher.temperatures=[2.0]", "loss.temperature=2.0")
    damaged = tmp_path / "damaged"
    shutil.copytree(road / "cache", damaged)
    max(damaged.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0).unlink()
    refuses(check_cache_of, "is damaged", f"teacher.cache={damaged}")
    refuses(check_checkpoints_of, "no checkpoint at", f"teacher.checkpoint={none}")
    refuses(check_checkpoints_of, "num_layers", "student.from_teacher=null", f"student.checkpoint={road / 'teacher'}",
            "student.model.num_layers=2")  # fmt: skip
    shutil.copytree(road / "teacher", none)
    next(none.glob("*.distcp")).write_bytes(b"")
    refuses(check_checkpoints_of, "is damaged", f"teacher.checkpoint={none}")


def test_a_store_that_answers_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(captured_road() / "recipe.yaml", [f"teacher.cache=s3://{BUCKET}/none"])
    with object_server() as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        store, cache = check_cache_of(recipe, "r.yaml")
        assert store.status == "ok" and "no cache there yet" in store.found
        assert cache.status == "fail" and "is not a cache" in cache.found
        elsewhere = recipe.model_copy(update={"teacher": recipe.teacher.model_copy(update={"cache": "s3://other/c"})})
        [store] = check_cache_of(elsewhere, "r.yaml")
        assert store.status == "fail" and "AWS_" in store.todo


def test_a_mount_that_one_node_lacks() -> None:
    road = captured_road()
    seen = visible_paths(load_recipe(road / "recipe.yaml"))
    assert seen == [str(road / name) for name in ("samples", "cache", "teacher")]
    first, second = check_mounts({"n1": seen, "n2": seen[:1]})
    assert (first.status, first.node) == ("ok", "n1")
    assert (second.status, second.node) == ("fail", "n2") and str(road / "cache") in second.found


def test_two_ranks_try_links_and_losses_together(tmp_path: Path) -> None:
    road = captured_road()
    layout = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"]
    ranks = start("doctor", road / "recipe.yaml", *layout, f"run_dir={tmp_path / 'run'}", "--json", ranks=2)
    first, second = ranks.wait()
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), (first, second)
    report = json.loads(first.stdout)
    checks = by_name(report["checks"])
    assert report["ok"] and report["ranks"] == 2
    for case in ("losses-fp32 TP 2", "losses-fp32 TP 2 + SP", "losses-bf16 TP 2", "losses-bf16 TP 2 + SP"):
        assert checks[case]["status"] == "ok" and "recompute" in checks[case]["found"]
    assert "gloo, 2 ranks: all_reduce" in checks["links"]["found"]
    assert "all 2 answer" in checks["ranks"]["found"]


def test_a_rank_that_never_comes_is_named() -> None:
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    alone |= {"SLURMD_NODENAME": "n7", "MASTER_ADDR": "127.0.0.1"}
    first = warm("doctor", "--quick", "--timeout", "2", env=alone)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "fail  ranks" in first.stdout and "1 of 2 came within 2 s; missing: rank 1; there: n7" in first.stdout
    other = warm("doctor", "--quick", "--timeout", "2", env=alone | {"SLURM_PROCID": "1"})
    assert other.returncode == 1 and other.stdout == ""
    assert "cannot reach rank 0 at 127.0.0.1" in other.stderr.splitlines()[-1] and "rank 1 on n7" in other.stderr
