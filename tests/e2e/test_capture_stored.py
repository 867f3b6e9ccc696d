"""What a capture stores: value types, the numbering of ids, whose tokens they are; and what it makes of damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache, open_cache
from megatron_kd.cache.verify import verify
from megatron_kd.data.samples import open_samples
from megatron_kd.errors import CacheError
from tests.assets import succeed, tiny_llama_folder
from tests.e2e.road import captured_road, one_error_line
from tests.unit.cache_rows import assert_rows_equal
from tests.warm import start, warm


@pytest.fixture(scope="module")
def road() -> Path:
    return captured_road()


def rows_of(cache: Path) -> list[Row]:
    reader = CacheReader(cache)
    return reader.read_many(range(len(reader)))


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float32"])
def test_every_value_type_is_captured_verified_and_trained_on(road: Path, tmp_path: Path, value_dtype: str) -> None:
    """The oracle is torch's rounding: of what float32 stores, bfloat16 and float16 store the nearest."""
    recipe, cache = road / "recipe.yaml", tmp_path / "cache"
    overrides = [f"teacher.cache={cache}", f"teacher.capture.value_dtype={value_dtype}"]
    report = json.loads(succeed(warm("capture", recipe, *overrides, "--json")).stdout)
    assert report["complete"] and report["rows_captured"] == 60 and report["missing_samples"] == ""
    assert verify(cache, "deep").ok
    exact = tmp_path / "exact"
    succeed(warm("capture", recipe, f"teacher.cache={exact}", "teacher.capture.value_dtype=float32"))
    for row, full, half in zip(rows_of(cache), rows_of(exact), rows_of(road / "cache"), strict=True):
        np.testing.assert_array_equal(row.ids, half.ids)
        np.testing.assert_array_equal(row.tail_logmass, half.tail_logmass)
        unrounded = torch.from_numpy(full.logprobs)
        stored = unrounded.to(getattr(torch, value_dtype)).float().numpy()
        np.testing.assert_array_equal(row.logprobs.astype(np.float32), stored)
        np.testing.assert_array_equal(half.logprobs, unrounded.half().numpy())
    run = [f"run_dir={tmp_path / 'run'}", "training.train_iters=3", "--json"]
    assert json.loads(succeed(warm("train", recipe, *overrides, *run)).stdout)["finished"]
    one_error_line(
        warm("capture", recipe, f"teacher.cache={cache}"),
        f"value_dtype there: '{value_dtype}', needed by this run: 'float16'",
    )


def test_ids_are_numbered_by_what_the_teacher_proposes(road: Path) -> None:
    """Of 60 rows of 48 positions one prefix is scored beforehand: that of the middle sample, here a whole row."""
    counts = open_samples(road / "samples").token_counts(vocab_size=open_cache(road / "cache").manifest.vocab_size)
    expected = build_rank_table(counts, CacheReader(road / "cache").read(30).ids)
    np.testing.assert_array_equal(open_cache(road / "cache").rank_table, expected)
    assert not np.array_equal(expected, build_rank_table(counts)), "the tokens of the corpus say something else"


def test_a_cache_with_another_numbering_goes_on(road: Path, tmp_path: Path) -> None:
    """As earlier versions numbered ids, by the tokens of the corpus: the rows are the same."""
    known = open_cache(road / "cache").manifest
    table = build_rank_table(open_samples(road / "samples").token_counts(vocab_size=known.vocab_size))
    made = create_cache(tmp_path / "cache", replace(known, rank_table_hash=rank_table_hash(table)), table)
    succeed(warm("capture", road / "recipe.yaml", f"teacher.cache={tmp_path / 'cache'}"))
    np.testing.assert_array_equal(open_cache(tmp_path / "cache").rank_table, table)
    assert open_cache(tmp_path / "cache").manifest.cache_id == made.manifest.cache_id
    for ours, theirs in zip(rows_of(tmp_path / "cache"), rows_of(road / "cache"), strict=True):
        assert_rows_equal(ours, theirs)


def test_the_smallest_cache(road: Path, tmp_path: Path) -> None:
    """One row, one id kept, two ranks that split it: sequence parallelism, and nothing for the second round."""
    small = ["data.train_tokens=48", "data.heldout_tokens=null", f"data.samples={tmp_path / 'samples'}"]
    succeed(warm("prepare", road / "recipe.yaml", *small))
    cache = tmp_path / "cache"
    layout = ["parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true"]
    overrides = [*small, f"teacher.cache={cache}", "teacher.top_k=1", "cluster.gpus_per_node=2", *layout]
    overrides.append("training.global_batch_size=1")
    first, second = start("capture", road / "recipe.yaml", *overrides, "--json", ranks=2).wait()
    assert json.loads(succeed(first).stdout)["rows_captured"] == 1 and succeed(second).stdout == ""
    assert verify(cache, "deep").ok and rows_of(cache)[0].ids.shape == (48, 1)


@pytest.mark.parametrize("victim", ["rank/c.0.0", "tokens/zarr.json", "."], ids=["chunk", "metadata", "folder"])
def test_what_was_deleted_is_named_and_captured_anew(road: Path, tmp_path: Path, victim: str) -> None:
    recipe, cache = road / "recipe.yaml", tmp_path / "cache"
    shutil.copytree(road / "cache", cache)
    before, committed = rows_of(cache), read_commit(open_cache(cache), 2)
    target = cache / "shards" / committed.attempt / victim
    shutil.rmtree(target) if target.is_dir() else target.unlink()

    reader = CacheReader(cache)
    for row in before:
        if 32 <= row.sample_id < 48:
            with pytest.raises(CacheError, match=f"sample {row.sample_id}"):
                reader.read(row.sample_id)
        else:
            assert_rows_equal(reader.read(row.sample_id), row)
    overrides = [f"teacher.cache={cache}", f"run_dir={tmp_path / 'run'}"]
    one_error_line(warm("train", recipe, *overrides), committed.attempt, "megatron-kd capture")
    found = warm("cache", "verify", cache, "--json")
    assert found.returncode == 1 and json.loads(found.stdout)["damaged_shards"] == [2]
    one_error_line(warm("capture", recipe, overrides[0]), str(cache), "shard 2 (samples 32–47) is damaged", "--repair")
    # A job that does another part is none the worse.
    other = json.loads(succeed(warm("capture", recipe, overrides[0], "--part", "1/4", "--json")).stdout)
    assert (other["rows_captured"], other["complete"]) == (0, True)

    first, second = start(
        "capture", recipe, overrides[0], "cluster.gpus_per_node=2", "--repair", "--json", ranks=2
    ).wait()
    assert json.loads(succeed(first).stdout)["rows_captured"] == 16 and succeed(second).stdout == ""
    again = read_commit(open_cache(cache), 2)
    assert again.objects == committed.objects and again.content_hashes == committed.content_hashes
    assert verify(cache, "deep").ok
    for ours, theirs in zip(rows_of(cache), before, strict=True):
        assert_rows_equal(ours, theirs)


def test_only_repair_looks_for_flipped_bits(road: Path, tmp_path: Path) -> None:
    recipe, cache = road / "recipe.yaml", tmp_path / "cache"
    shutil.copytree(road / "cache", cache)
    (chunk,) = (cache / "shards").glob("000001-*/tail_logmass/c.0")
    flipped = bytearray(chunk.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    chunk.write_bytes(flipped)
    (cache / "commits/000003.json").write_text("{")
    one_error_line(warm("capture", recipe, f"teacher.cache={cache}"), "shard 3 (samples 48–59) is damaged", "--repair")
    report = json.loads(succeed(warm("capture", recipe, f"teacher.cache={cache}", "--repair", "--json")).stdout)
    assert report["rows_captured"] == 16 + 12
    assert verify(cache, "deep").ok


def test_samples_of_another_tokenizer_are_refused(road: Path, tmp_path: Path) -> None:
    """Two merges exchanged: every id exists, some mean another string. Both engines know the teacher's tokenizer."""
    folder = tmp_path / "tokenizer_b"
    shutil.copytree(tiny_llama_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [piece for piece, number in vocabulary.items() if number in (700, 701)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    swapped = [f"data.samples={tmp_path / 'samples'}", f"data.tokenizer={folder}"]
    succeed(warm("prepare", road / "recipe.yaml", *swapped))
    for engine in ([], ["teacher.engine=hf", "teacher.checkpoint=null"]):
        done = warm("capture", road / "recipe.yaml", *swapped, *engine, f"teacher.cache={tmp_path / 'cache'}")
        one_error_line(done, str(tmp_path / "samples"), "tokenizer_b", "different tokens", "data.tokenizer")
    assert not (tmp_path / "cache").exists()
