"""``cache fidelity``: its figures against transformers in float64, in every layout the same, and wrong rows named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import yaml

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache, open_cache
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import write_shard
from megatron_kd.data.samples import open_samples
from tests.assets import succeed, tiny_llama_folder
from tests.e2e.road import captured_road, one_error_line
from tests.warm import start, warm

ROWS = 3
KS = [1, 2, 5, 10, 20, 50, 100, 200]


@pytest.fixture(scope="module")
def road() -> Path:
    return captured_road()


@pytest.fixture(scope="module")
def report(road: Path) -> Any:
    done = warm("cache", "fidelity", road / "recipe.yaml", "--rows", str(ROWS), "--json")
    return json.loads(succeed(done).stdout)


def whole_distributions(road: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q [tokens, V] of the teacher at temperatures 1 and 2, from transformers in float64."""
    from transformers import LlamaForCausalLM

    teacher = LlamaForCausalLM.from_pretrained(tiny_llama_folder(), dtype=torch.float64)
    samples = open_samples(road / "samples")
    rows = samples.rows(samples.split("heldout")[:ROWS])
    trains = torch.from_numpy(rows.loss_mask > 0).flatten()
    with torch.no_grad():
        logits = teacher(torch.from_numpy(rows.tokens.astype(np.int64))).logits.flatten(0, 1)[trains]
    return logits.log_softmax(-1), (logits / 2).log_softmax(-1)


def test_figures_are_those_of_transformers_in_float64(road: Path, report: Any) -> None:
    log_p, log_q = whole_distributions(road)
    p, q = log_p.exp(), log_q.exp()
    assert report["probe"]["split"] == "heldout" and report["probe"]["rows"] == ROWS
    assert report["probe"]["tokens"] == len(p)
    assert report["dense_kl"] == pytest.approx(float((p * (log_p - log_q)).sum(1).mean()), rel=1e-4)
    found = {(row["top_k"], row["value_dtype"], row["tail"]): row for row in report["results"]}
    assert len(found) == len(report["results"]) == len(KS) * 3 * 5
    for k in KS:
        best = log_p.topk(k).indices
        inside = torch.zeros_like(p).scatter_(1, best, 1.0)
        tail_p, tail_q = (p * (1 - inside)).sum(1), (q * (1 - inside)).sum(1)
        filled = torch.where(inside > 0, p, q * (tail_p / tail_q)[:, None])
        kl = (p * (log_p - filled.log())).sum(1).mean()
        error = ((p - filled).square().sum(1) / (q - p).square().sum(1)).mean().sqrt()
        truncated = (p * inside).sum(1, keepdim=True) * q - p * inside
        cut = ((truncated - (q - p)).square().sum(1) / (q - p).square().sum(1)).mean().sqrt()
        row = found[k, "float32", "bucket"]
        assert row["teacher_mass"] == pytest.approx(float(1 - tail_p.mean()), rel=1e-4)
        assert row["kl"] == pytest.approx(float(kl), rel=1e-3)
        assert row["gradient_error"] == pytest.approx(float(error), rel=1e-3)
        assert found[k, "float32", "truncate"]["gradient_error"] == pytest.approx(float(cut), rel=1e-3)


def test_the_cache_is_the_dense_teacher_s(report: Any) -> None:
    cache = report["cache"]
    assert cache["ok"] and cache["wrong_samples"] == []
    assert [row["sample"] for row in cache["rows"]] == [50, 51, 52]
    assert (cache["top_k"], cache["value_dtype"]) == (20, "float16") and cache["bytes_per_token"] > 40
    for row in cache["rows"]:
        assert row["error"] < 5e-5 and row["problem"] is None


@pytest.mark.parametrize(
    "layout",
    [[], ["parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"]],
    ids=["dp2", "tp2_sp"],
)
def test_every_layout_measures_the_same(road: Path, report: Any, layout: list[str]) -> None:
    # A budget by which shards of 512 and of 491 real rows, counted so, would make 5 and 4 chunks of 48 positions.
    arguments = ["cluster.gpus_per_node=2", *layout, "loss.chunk_mib=0.4578", "--rows", str(ROWS), "--json"]
    first, other = start("cache", "fidelity", road / "recipe.yaml", *arguments, ranks=2).wait()
    found = json.loads(succeed(first).stdout)
    assert succeed(other).stdout == "", "printed once"
    assert found["probe"] == report["probe"]
    assert found["dense_kl"] == pytest.approx(report["dense_kl"], rel=1e-5)
    for ours, theirs in zip(found["results"], report["results"], strict=True):
        for name in ("teacher_mass", "loss", "gradient_error"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-6), (ours, theirs)
        if theirs["kl"] is not None and theirs["tail"] == "bucket":
            assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-3, abs=1e-9)
    assert found["cache"]["ok"] and len(found["cache"]["rows"]) == ROWS


def test_text_and_figure(road: Path, tmp_path: Path) -> None:
    picture = tmp_path / "fidelity.png"
    arguments = ["--rows", "1", "--figure", str(picture)]
    done = succeed(warm("cache", "fidelity", road / "recipe.yaml", *arguments))
    for words in ("the teacher at 2 times its temperature", "renorm. both", "worst row: sample 50", "bytes per token"):
        assert words in done.stdout
    assert "fidelity: 1/1 rows" in done.stderr
    drawn = matplotlib.image.imread(picture)
    assert drawn.shape[0] > 300 and np.unique(drawn[..., :3].reshape(-1, 3), axis=0).shape[0] > 50


def test_on_a_trained_student_the_loss_is_that_of_evaluate(road: Path, tmp_path: Path) -> None:
    """Two programs of one figure: the bucket KL at the recipe's K, and the teacher's mass, on all held-out rows."""
    run = tmp_path / "run"
    steps = ["training.train_iters=3", "checkpoint.save_interval=3"]
    succeed(warm("train", road / "recipe.yaml", f"run_dir={run}", *steps))
    evaluated = json.loads(succeed(warm("evaluate", run, "--json")).stdout)
    student = run / "checkpoints" / "iter_0000003"
    arguments = ["--rows", "10", "--student", str(student), "--json"]
    found = json.loads(succeed(warm("cache", "fidelity", road / "recipe.yaml", *arguments)).stdout)
    assert found["student"] == f"tiny_llama_2layers from {student}"
    (row,) = (
        row for row in found["results"] if (row["top_k"], row["value_dtype"], row["tail"]) == (20, "float16", "bucket")
    )
    assert row["loss"] == pytest.approx(evaluated["eval/kd"], rel=1e-4)
    assert row["teacher_mass"] == pytest.approx(evaluated["eval/teacher_mass"], rel=1e-4)
    assert found["dense_kl"] > row["loss"], "the bucket is a lower bound"


def test_help_fits_a_terminal() -> None:
    done = warm("cache", "fidelity", "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    lines = succeed(done).stdout.splitlines()
    assert lines[0].startswith("Usage: megatron-kd cache fidelity ") and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")]


def test_without_a_cache_only_the_forms_are_measured(road: Path, tmp_path: Path) -> None:
    done = warm(
        "cache", "fidelity", road / "recipe.yaml", f"teacher.cache={tmp_path / 'none'}", "--rows", "1", "--json"
    )
    found = json.loads(succeed(done).stdout)
    assert found["cache"] is None and len(found["results"]) == len(KS) * 15


def changed_copy(road: Path, target: Path, sample: int) -> Path:
    """The road's cache with two ids of one row exchanged at position 7: every checksum fits, the teacher does not."""
    source = open_cache(road / "cache")
    copy = create_cache(target, source.manifest, source.rank_table)
    reader = CacheReader(source)

    def change(row: Row) -> Row:
        if row.sample_id != sample:
            return row
        ids = row.ids.copy()
        ids[7, [0, 9]] = ids[7, [9, 0]]
        return replace(row, ids=ids)

    for shard in range(source.manifest.shards):
        write_shard(copy, shard, [change(row) for row in reader.read_many(source.manifest.shard_samples(shard))])
    return target


def test_a_row_of_another_teacher_is_named(road: Path, tmp_path: Path) -> None:
    cache = changed_copy(road, tmp_path / "cache", 51)
    assert verify(cache, "deep").ok, "nothing but the teacher can tell"
    done = warm("cache", "fidelity", road / "recipe.yaml", f"teacher.cache={cache}", "--rows", str(ROWS))
    assert done.returncode == 1 and done.stderr.count("error") == 0
    assert "wrong: sample 51 differs from the dense teacher at position 7" in done.stdout
    assert "worst row: sample 51" in done.stdout
    done = warm("cache", "fidelity", road / "recipe.yaml", f"teacher.cache={cache}", "--rows", str(ROWS), "--json")
    found = json.loads(done.stdout)["cache"]
    assert done.returncode == 1 and not found["ok"]
    assert (found["worst_sample"], found["wrong_samples"]) == (51, [51])


def test_a_damaged_row_is_named(road: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(road / "cache", cache)
    record = json.loads((cache / "commits" / "000003.json").read_text())  # samples 48 to 59
    file = cache / "shards" / record["attempt"] / "logprob_delta" / "c.0.0"
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 16
    file.write_bytes(data)
    done = warm("cache", "fidelity", road / "recipe.yaml", f"teacher.cache={cache}", "--rows", "10", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["cache"]
    unreadable = [row["sample"] for row in found["rows"] if row["problem"] is not None]
    assert unreadable and unreadable == found["wrong_samples"] and found["worst_sample"] in unreadable
    assert all(f"sample {row['sample']}" in row["problem"] for row in found["rows"] if row["problem"] is not None)
    readable = [row for row in found["rows"] if row["problem"] is None]
    assert all(row["error"] < 5e-5 for row in readable)


def test_bad_input_is_one_line(road: Path, tmp_path: Path) -> None:
    recipe = road / "recipe.yaml"
    one_error_line(warm("cache", "fidelity", recipe, "--rows", "0"), "--rows is 0, must be at least 1")
    one_error_line(warm("cache", "fidelity", recipe, "--rows", "11"), "has 10 rows, --rows asks for 11")
    hot = warm("cache", "fidelity", recipe, "teacher.temperatures=[2.0, 1.0]")
    one_error_line(hot, "stores values at temperature 1, the first of teacher.temperatures is 2: put 1 first")
    figure = tmp_path / "nowhere" / "x.png"
    one_error_line(warm("cache", "fidelity", recipe, "--figure", figure), f"there is no folder {figure.parent}")
    one_error_line(warm("cache", "fidelity", recipe, "--figure", tmp_path), f"{tmp_path} is a folder")
    values = yaml.safe_load(recipe.read_text())
    values["teacher"]["checkpoint"] = None
    values["student"] = {}
    other = tmp_path / "recipe.yaml"
    other.write_text(yaml.safe_dump(values))
    one_error_line(warm("cache", "fidelity", other), "teacher.checkpoint is not set")
