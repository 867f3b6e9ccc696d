"""``bench capture``: its bare forward gives a model's own logits, its parts are those of a capture, its sums hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.bench.capture import bench_capture, micro_batches, shard_rows
from megatron_kd.bench.capture_bare import BareForward, check_engine
from megatron_kd.bench.capture_measure import PARTS, Round, summarize
from megatron_kd.bench.capture_table import capture_table
from megatron_kd.config import Recipe, load_recipe
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.errors import ConfigError
from megatron_kd.testing import run_distributed
from tests.assets import tiny_llama_folder, tiny_recipe

SLOW = Round(forward=3.0, head=1.0, top_k=4.5, rows=0.25, write=0.25)
FAST = Round(forward=1.0, head=1.0, top_k=2.0, rows=0.5, write=1.5)
EQUAL = Round(forward=1.0, head=1.0, top_k=1.5, rows=0.25, write=0.25)


def tiny(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(tiny_recipe(folder), overrides)


def test_a_round() -> None:
    assert (SLOW.bare, SLOW.scoring, SLOW.capture) == (4.0, 4.75, 5.0)
    assert SLOW.overhead == 0.25
    assert FAST.overhead == 1.0
    assert EQUAL.overhead == 0.0


def test_medians_and_ranges() -> None:
    found = summarize([SLOW, FAST, EQUAL])
    assert found["us_per_token"] == pytest.approx(
        {"forward": 1e6, "head": 1e6, "top_k": 2e6, "rows": 0.25e6, "write": 0.25e6, "bare": 2e6, "capture": 4e6}
    )
    assert set(found["us_per_token"]) == set(found["us_per_token_spread"]) == {*PARTS, "bare", "capture"}
    assert found["us_per_token_spread"]["top_k"] == pytest.approx([1.5e6, 4.5e6])
    assert (found["bare_tokens_per_s"], found["capture_tokens_per_s"]) == pytest.approx((0.5, 0.25))
    assert found["overhead"] == 0.25, "the median of the ratios, not the ratio of the medians"
    assert found["overhead_spread"] == [0.0, 1.0]
    assert found["overhead_without_write"] == 0.1875
    assert found["writer_share"] == pytest.approx(0.125)


def test_logits_come_chunk_by_chunk_into_one_buffer() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(10, 6, generator=generator), torch.randn(70, 6, generator=generator)
    bare = BareForward(lambda tokens: (hidden, weight), vocab_size=65, chunk_bytes=4 * 128 * 4)
    places: set[int] = set()
    parts: list[torch.Tensor] = []
    for _ in range(2):
        parts.clear()
        for chunk in bare.logits(*bare.hidden(torch.zeros(1, 10))):
            places.add(chunk.data_ptr())
            parts.append(chunk.clone())
    assert [len(part) for part in parts] == [4, 4, 2] and len(places) == 1
    torch.testing.assert_close(torch.cat(parts), hidden @ weight[:65].t())


def test_a_soft_cap_and_a_shard_of_the_head() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(5, 6, generator=generator), torch.randn(8, 6, generator=generator)
    bare = BareForward(lambda tokens: (hidden, weight), vocab_size=21, vocab_start=lambda weight: 16, logit_softcap=2.0)
    (logits,) = bare.logits(hidden, weight)
    torch.testing.assert_close(logits, 2 * torch.tanh(hidden @ weight[:5].t() / 2))


def bare_logits_of_both_engines(rank: int, world: int, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """The bare forward's logits of one row with each engine; the model's own; a bench run that keeps its shards."""
    from transformers import AutoModelForCausalLM

    from megatron_kd.bench import capture as job
    from megatron_kd.bench.cache_capture import make_inputs
    from megatron_kd.bench.capture_bare import bare_forward
    from megatron_kd.bench.capture_measure import measure_rounds
    from megatron_kd.cache.reader import CacheReader
    from megatron_kd.cache.verify import verify
    from megatron_kd.models.launch import join_ranks
    from megatron_kd.teacher.engine import open_teacher
    from megatron_kd.teacher.score import score_rows

    make_inputs(tiny(folder), show_progress=False)
    samples = open_samples(folder / "samples")
    tokens = torch.from_numpy(samples.rows([0, 1]).tokens).long()
    logits = {}
    groups = join_ranks(tiny(folder))
    for engine in ("hf", "megatron"):
        recipe = tiny(folder, f"teacher.engine={engine}", "loss.chunk_mib=0.05")
        teacher = open_teacher(recipe, groups)
        bare = bare_forward(teacher, recipe, groups)
        parts = [part.clone() for part in bare.logits(*bare.hidden(tokens))]
        assert len(parts) > 1
        logits[engine] = torch.cat(parts).view(48, 2, -1).transpose(0, 1).numpy()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder(), dtype=torch.float32)
    with torch.no_grad():
        own = model(input_ids=tokens).logits.numpy()

    recipe = tiny(folder, "teacher.capture.micro_batch_size=2", "teacher.capture.rows_per_shard=3")
    batches = micro_batches(recipe, samples, 6)
    subject = job._subject(recipe, samples, teacher, groups, len(batches), folder)
    seen: list[str] = []
    rounds = measure_rounds(subject, batches, lambda units=1, note="": seen.append(note))
    assert len(rounds) == 3 and len(seen) == 4
    report = verify(folder / "measured", "deep")
    assert report.ok, report.text()
    reader = CacheReader(folder / "measured")
    for index, ids in enumerate([batches[0], *batches]):
        expected = score_rows(teacher, samples, ids, np.float16)
        for i, row in enumerate([*expected, expected[0]]):
            read = reader.read(3 * index + i)
            assert np.array_equal(read.tokens, row.tokens) and np.array_equal(read.ids, row.ids)
            assert np.array_equal(read.logprobs, row.logprobs)
    return logits, own, rounds


def test_real_teachers(tmp_path: Path) -> None:
    """The oracle is transformers' own forward pass; what the bench writes is a sound cache of the rows it scored."""
    (answer,) = run_distributed(bare_logits_of_both_engines, 1, tmp_path)
    logits, own, rounds = answer
    for engine in ("hf", "megatron"):
        assert logits[engine].shape == own.shape
        np.testing.assert_allclose(logits[engine], own, atol=1e-3, err_msg=engine)
    for seen in rounds:
        assert all(math.isfinite(getattr(seen, part)) and getattr(seen, part) > 0 for part in PARTS)


def some_samples(folder: Path, rows: int) -> SampleSet:
    from megatron_kd.data.packing import PackedRow
    from megatron_kd.data.sample_writer import write_samples

    row = PackedRow(np.arange(48, dtype=np.int32), np.ones(48, np.uint8), np.zeros(1, np.int32))
    return write_samples(
        folder / "samples",
        {"train": iter([row] * rows)},
        seq_length=48,
        packing="concatenate",
        tokenizer_identity={"name": "none", "vocab_size": 48, "sha256": "0"},
        corpus_identity={},
        selection={},
    )


@pytest.mark.parametrize(
    ("there", "rows", "size", "expected"),
    [
        (10, None, 1, [[0], [2], [4], [6], [8]]),
        (10, 4, 2, [[0, 2], [5, 7]]),
        (10, 3, 2, [[0, 2], [5, 7]]),
        (2, 4, 1, [[0], [0], [1], [1]]),
        (1, None, 1, [[0]] * 5),
    ],
)
def test_micro_batches(tmp_path: Path, there: int, rows: int | None, size: int, expected: list[list[int]]) -> None:
    recipe = tiny(tmp_path, f"teacher.capture.micro_batch_size={size}")
    assert micro_batches(recipe, some_samples(tmp_path, there), rows) == expected


@pytest.mark.parametrize(("length", "wanted", "rows"), [(48, 16, 16), (48, 1000, 341), (64, 1000, 256), (64, 1, 1)])
def test_shards_are_the_recipes_up_to_a_size(tmp_path: Path, length: int, wanted: int, rows: int) -> None:
    recipe = tiny(tmp_path, f"data.seq_length={length}", f"teacher.capture.rows_per_shard={wanted}")
    assert shard_rows(recipe) == rows


def test_an_engine_without_hidden_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher.engine vllm .* set teacher.engine to megatron or hf"):
        check_engine(tiny(tmp_path, "teacher.engine=vllm"))


@pytest.mark.parametrize("name", ["rows", "row_length", "threads"])
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} is 0, must be positive"):
        bench_capture(**{name: 0})  # type: ignore[arg-type]


def row(**changes: Any) -> dict[str, Any]:
    about = {
        "teacher": "some-model", "engine": "hf", "dtype": "fp32", "top_k": 100, "vocab": 49152, "rows": 5,
        "row_tokens": 2048, "micro_batch_size": 1, "shard_tokens": 16384, "rounds": 5, "ranks": 1,
        "source": "runs/samples", "tensor_parallel": 1, "data_parallel": 1, "device": "cpu",
        "threads": 2, "clock": "process_cpu",
    }  # fmt: skip
    return {**about, **summarize([SLOW, FAST, EQUAL]), **changes}


def test_the_table() -> None:
    text = capture_table(row())
    assert "some-model, engine hf, fp32, top 100, vocabulary 49,152, cpu, 2 threads\n" in text
    assert (
        "5 rows of 2,048 tokens" in text
        and "rows: runs/samples\n" in text
        and "CPU time a token" in text
        and "ranks" not in text
    )
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["bare forward"].split() == ["bare", "forward", "2,000,000.00", "(2,000,000.00–4,000,000.00)", "100.0%"]
    assert lines["capture"].endswith(" 200.0%")
    assert "overhead over the bare forward: 25.0% (0.0%–100.0%), without the writer 18.8%" in text
    on_gpus = capture_table(row(ranks=4, tensor_parallel=2, data_parallel=2, device="gpu", clock="wall"))
    assert "2 × 2 ranks (tensor × data parallel), gpu\n" in on_gpus and "CPU" not in on_gpus
