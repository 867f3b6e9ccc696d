"""Capture: killed at any moment it resumes, in every layout the same cache, and the values are the teacher's."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.verify import verify
from megatron_kd.data.samples import open_samples
from tests.assets import succeed, tiny_llama_folder
from tests.e2e.road import captured_road, one_error_line
from tests.unit.cache_rows import assert_rows_equal
from tests.warm import start, warm

FP16_HALF_STEP = 2.0**-11
"""Relative error of rounding to float16."""
TOP_K = 20
TP2 = ["parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"]
HF = ["teacher.engine=hf", "teacher.checkpoint=null"]


@pytest.fixture(scope="module")
def road() -> Path:
    return captured_road()


def rows_of(cache: Path) -> list[Row]:
    reader = CacheReader(cache)
    return reader.read_many(range(len(reader)))


def test_values_are_those_of_hugging_face_in_float64(road: Path) -> None:
    """An oracle that shares no code: transformers' model in float64, log_softmax and topk of torch."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama_folder(), dtype=torch.float64)
    samples, rows = open_samples(road / "samples"), rows_of(road / "cache")
    assert len(rows) == len(samples) == 60
    reordered = 0
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(np.array(samples.tokens(i), np.int64))
        np.testing.assert_array_equal(row.tokens, tokens.numpy())
        with torch.no_grad():
            exact = model(tokens[None]).logits[0].log_softmax(-1)
        best, ids = exact.topk(TOP_K)
        at_ids = exact.gather(1, torch.from_numpy(row.ids.astype(np.int64)))
        # Each stored value is that of its own id; ranks may only trade places where the teacher nearly ties.
        np.testing.assert_allclose(row.logprobs.astype(np.float64), at_ids, rtol=FP16_HALF_STEP, atol=2e-5)
        np.testing.assert_allclose(row.logprobs.astype(np.float64), best, rtol=FP16_HALF_STEP, atol=2e-5)
        reordered += int((ids.numpy() != row.ids).sum())
        outside = exact.exp().sum(-1) - at_ids.exp().sum(-1)
        np.testing.assert_allclose(np.exp(row.tail_logmass.astype(np.float64)), outside, rtol=1e-4, atol=1e-6)
    assert reordered <= 60 * 48 * TOP_K * 0.001, f"{reordered} ids stand in another order"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, []),
        (2, TP2),
        (1, ["teacher.capture.micro_batch_size=5", "teacher.capture.rows_per_shard=7"]),
        (1, [*HF, "teacher.capture.micro_batch_size=5"]),
        (2, HF),
    ],
    ids=["dp2", "tp2_sp", "other_batches", "hf", "hf_dp2"],
)
def test_every_layout_and_engine_captures_the_same(road: Path, tmp_path: Path, ranks: int, layout: list[str]) -> None:
    cache = tmp_path / "cache"
    overrides = [f"teacher.cache={cache}", f"cluster.gpus_per_node={ranks}", *layout]
    first, *others = start("capture", road / "recipe.yaml", *overrides, "--json", ranks=ranks).wait()
    assert json.loads(succeed(first).stdout)["rows_captured"] == 60
    assert all(succeed(other).stdout == "" for other in others), "figures are printed once"
    assert verify(cache, "deep").ok
    swapped = 0
    for ours, theirs in zip(rows_of(cache), rows_of(road / "cache"), strict=True):
        a, b = ours.logprobs.astype(np.float64), theirs.logprobs.astype(np.float64)
        # The same float32 computation in another order may fall on the other side of one rounding step.
        np.testing.assert_allclose(a, b, rtol=2 * FP16_HALF_STEP, atol=0)
        np.testing.assert_allclose(ours.tail_logmass, theirs.tail_logmass, rtol=0, atol=1e-4)
        unlike = ours.ids != theirs.ids
        swapped += int(unlike.sum())
        if unlike.any():  # only between neighbours that tie
            gaps = np.minimum(np.abs(np.diff(b, axis=1, prepend=np.inf)), np.abs(np.diff(b, axis=1, append=-np.inf)))
            last = np.arange(TOP_K) == TOP_K - 1  # it may tie with the first one that was not kept
            assert np.all((gaps[unlike] <= 2e-3) | np.broadcast_to(last, unlike.shape)[unlike])
    assert swapped <= 60 * 48 * TOP_K * 0.001


@pytest.mark.parametrize("layout", [HF, TP2], ids=["hf_dp2", "tp2_sp"])
def test_killed_at_random_moments_it_resumes(road: Path, tmp_path: Path, layout: list[str]) -> None:
    """SIGKILL of a two-rank job, resumed by one rank.

    Shards that were committed stay as they are, byte for byte and inode for inode, and every row is, bit for bit, what
    an undisturbed capture in the layout that wrote it has.
    """
    engine = layout if layout is HF else []
    undisturbed = {"killed": tmp_path / "undisturbed", "resumed": road / "cache"}
    ranks = ["cluster.gpus_per_node=2", *layout]
    for rank in start(
        "capture", road / "recipe.yaml", f"teacher.cache={undisturbed['killed']}", *ranks, ranks=2
    ).wait():
        succeed(rank)
    if engine:  # at one row in a pass data-parallel ranks compute what one rank computes
        undisturbed["resumed"] = undisturbed["killed"]
    cache, seed = tmp_path / "cache", random.randrange(2**32)
    chance = random.Random(seed)
    arguments: list[str | Path] = [
        "capture",
        road / "recipe.yaml",
        f"teacher.cache={cache}",
        "teacher.capture.rows_per_shard=2",
    ]
    resuming = [*arguments, *engine, "--json"]
    arguments += ["cluster.gpus_per_node=2", *layout, "--json"]
    kills_midway = 0
    done: set[str] = set()
    for _ in range(12):
        before = _identities(cache)
        job = start(*arguments, ranks=2)
        # The moment counts from the first sign of work, so that kills fall on shards and not on imports.
        target = len(_commits(cache)) + chance.randrange(0, 5)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(_commits(cache)) < min(target, 30) and not _all_done(cache):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        for pid in job.pids:
            os.kill(pid, signal.SIGKILL)
        codes = {rank.returncode for rank in job.wait(20)}
        after = _identities(cache)
        assert {name: after[name] for name in before} == before, f"seed {seed}: a committed shard was touched"
        done = _commits(cache)
        kills_midway += int(codes == {-signal.SIGKILL} and 0 < len(done) < 30)
        if len(done) > 24:
            break
    assert kills_midway >= 2, f"seed {seed}: {kills_midway} kills fell between the first and the last shard"
    assert len(done) < 30, f"seed {seed}: nothing was left to resume"
    done_rows = warm("train", road / "recipe.yaml", f"teacher.cache={cache}", f"run_dir={tmp_path / 'run'}")
    one_error_line(done_rows, str(cache), "lacks samples", "megatron-kd capture")

    before = _identities(cache)
    report = json.loads(succeed(warm(*resuming)).stdout)
    assert report["rows_captured"] == 2 * (30 - len(done)), "only what is missing is done"
    after = _identities(cache)
    assert {name: after[name] for name in before} == before
    assert verify(cache, "deep").ok
    expected = {name: rows_of(path) for name, path in undisturbed.items()}
    for row in rows_of(cache):
        of_killed = f"{row.sample_id // 2:06d}.json" in done
        assert_rows_equal(row, expected["killed" if of_killed else "resumed"][row.sample_id])
    again, *_ = start(*arguments, ranks=2).wait()
    assert json.loads(succeed(again).stdout)["rows_captured"] == 0
    assert _identities(cache) == after


def test_the_drift_between_the_engines(road: Path, tmp_path: Path) -> None:
    """An hf cache is another one than a Megatron cache, hardly differs from it, and trains as well."""
    recipe, cache = road / "recipe.yaml", tmp_path / "cache"
    done = warm("capture", recipe, *HF)
    one_error_line(done, str(road / "cache"), "teacher.engine there: 'megatron', needed by this run: 'hf'")
    succeed(warm("capture", recipe, f"teacher.cache={cache}", *HF))
    drift = json.loads(succeed(warm("cache", "drift", road / "cache", cache, "--json")).stdout)
    assert (drift["rows"], drift["positions"]) == (60, 60 * 48)
    assert drift["logprob_max_beyond_rounding"] < 1e-4
    assert drift["kl_max"] < 1e-5 and drift["top1_agreement"] > 0.999 and drift["ids_differing_max"] <= 1
    assert "engine: 'megatron', 'hf'" in drift["teachers_differ_in"]
    succeed(warm("capture", recipe, f"teacher.cache={tmp_path / 'bf16'}", *HF, "teacher.hf.dtype=bf16"))
    coarse = warm("cache", "drift", cache, tmp_path / "bf16", "--rows", "7", "--json")
    assert "7/7 rows" in coarse.stderr
    rounded = json.loads(succeed(coarse).stdout)
    # The 8 bits of bfloat16 move log-probabilities by more than their storage, and every figure shows it.
    assert 1e-3 < rounded["logprob_mean"] < 0.1 and rounded["logprob_max_beyond_rounding"] > 10 * FP16_HALF_STEP
    assert 1e-6 < rounded["kl_mean"] < 0.01 and 0.8 < rounded["top1_agreement"] < 1
    assert 0 < rounded["ids_differing_mean"] < 4
    assert "kl_max" in succeed(warm("cache", "drift", cache, cache)).stdout
    one_error_line(warm("cache", "drift", cache, road / "samples"), "is not a cache")
    report = warm("train", recipe, f"teacher.cache={cache}", f"run_dir={tmp_path}", "training.train_iters=3", "--json")
    assert json.loads(succeed(report).stdout)["finished"]


def test_the_hf_engine_does_not_split(road: Path, tmp_path: Path) -> None:
    arguments = [
        "parallelism.tensor_model_parallel_size=2",
        "cluster.gpus_per_node=2",
        f"teacher.cache={tmp_path / 'x'}",
    ]
    for done in start("capture", road / "recipe.yaml", *HF, *arguments, ranks=2).wait():
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "tensor_model_parallel_size 1, not 2: capture with it set to 1" in done.stderr
    assert not (tmp_path / "x").exists()


def _commits(cache: Path) -> set[str]:
    folder = cache / "commits"
    return {path.name for path in folder.glob("*.json")} if folder.is_dir() else set()


def _all_done(cache: Path) -> bool:
    return len(_commits(cache)) == 30


def _identities(cache: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, modification time and size of every file of a committed shard, and of its record."""
    found = {}
    for name in _commits(cache):
        record = cache / "commits" / name
        attempt = cache / "shards" / json.loads(record.read_text())["attempt"]
        for path in (record, *(path for path in attempt.rglob("*") if path.is_file())):
            status = path.stat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found
