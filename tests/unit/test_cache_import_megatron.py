"""Importing Megatron-LM's tars: files of its own saver come out as the teacher's top K of the right sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.cache.importers import import_cache
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.verify import verify
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from tests.unit.cache_import_sources import (
    LENGTH,
    TYPES,
    VOCAB,
    make_samples,
    opened,
    read_tar,
    saved,
    teacher_logits,
    write_first_layout,
    write_second_layout,
    write_tar,
)

pytest.importorskip("zstandard", reason="Megatron-LM's saver needs zstandard: pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples") / "set", 16)


@pytest.fixture(scope="module")
def tars(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """First layout: two context-parallel and two data-parallel ranks, four iterations of four rows in two tars each."""
    folder = tmp_path_factory.mktemp("first")
    write_first_layout(folder, samples, cp=2, dp=2)
    return folder


@pytest.fixture
def copied(tars: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tars, tmp_path / "tars"))


def run(folder: Path, samples: SampleSet, cache: Path, vocab: int = VOCAB, **options: Any) -> Any:
    source = opened(folder, samples, vocab, **options)
    return import_cache(source, samples, cache, vocab_size=vocab, rows_per_shard=5, trust_order=True)


def assert_is_the_teacher(
    cache: Path, samples: SampleSet, k: int, save_dtype: str = "fp16", vocab: int = VOCAB
) -> None:
    """Every row against the softmax of float64, and the cache against its own deepest check."""
    report = verify(cache, "deep")
    assert report.problems == [] and report.rows_committed == len(samples)
    reader = CacheReader(cache)
    for sample in range(len(samples)):
        row = reader.read(sample, samples.row_hash(sample))
        logits = teacher_logits(samples, sample, vocab)
        logprobs = torch.log_softmax(logits.double(), -1)
        best, ids = logits.topk(k)
        assert np.array_equal(row.ids, ids.numpy())
        exact = logprobs.gather(-1, ids)
        stored = torch.from_numpy(row.logprobs.astype("f8"))
        torch.testing.assert_close(stored, exact, rtol=torch.finfo(TYPES[save_dtype]).eps / 2 + 1e-6, atol=1e-6)
        assert torch.equal(stored, stored.to(TYPES[save_dtype]).double())
        tail = -np.expm1(np.log(np.exp(row.logprobs.astype("f8")).sum(-1)))
        np.testing.assert_allclose(np.exp(row.tail_logmass.astype("f8")), np.maximum(tail, 1e-8), rtol=1e-5)
        assert np.array_equal(row.loss_mask, samples.loss_mask(sample))
        assert best.shape == (LENGTH, k)


@pytest.mark.parametrize(
    ("layout", "save_dtype"),
    [
        ({"cp": 1, "dp": 1, "micro_batch": 1, "micro_batches": 1}, "fp16"),
        ({"cp": 1, "dp": 4, "micro_batch": 2, "micro_batches": 2}, "bf16"),
        ({"cp": 4, "dp": 1, "micro_batch": 4, "micro_batches": 2}, "fp32"),
        ({"cp": 2, "dp": 2, "micro_batch": 2, "micro_batches": 2, "per_tar": 1}, "fp16"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_first_layout(samples: SampleSet, tmp_path: Path, layout: dict[str, Any], save_dtype: str) -> None:
    write_first_layout(tmp_path / "tars", samples, save_dtype=save_dtype, **layout)
    report = run(tmp_path / "tars", samples, tmp_path / "cache")
    assert (report.rows, report.rows_imported, report.surplus_rows, report.matched_by) == (16, 16, 0, "order")
    assert report.tokens_imported == 16 * LENGTH and report.positions_scaled == 0
    assert report.evidence.own > 5 * report.evidence.other
    assert_is_the_teacher(tmp_path / "cache", samples, 5, save_dtype)
    teacher = CacheReader(tmp_path / "cache").manifest.teacher
    assert (teacher["engine"], teacher["tail"], teacher["matched_by"]) == ("megatron-lm", "by subtraction", "order")
    assert teacher["source"]["identifiers"]["sequence_length"] == LENGTH


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_second_layout(samples: SampleSet, tmp_path: Path, dp: int, micro_batch: int) -> None:
    write_second_layout(tmp_path / "tars", samples, dp=dp, micro_batch=micro_batch)
    (tmp_path / "tars" / "dp0__0-4.tar.stale").write_bytes(b"superseded")
    report = run(tmp_path / "tars", samples, tmp_path / "cache")
    assert report.rows_imported == 16
    assert_is_the_teacher(tmp_path / "cache", samples, 5)


def test_ids_of_17_bits(tmp_path: Path) -> None:
    vocab = 2**17
    samples = make_samples(tmp_path / "samples", 4, vocab=vocab)
    write_first_layout(tmp_path / "first", samples, vocab=vocab, k=7)
    write_second_layout(tmp_path / "second", samples, vocab=vocab, k=7)
    for name in ("first", "second"):
        run(tmp_path / name, samples, tmp_path / f"cache-{name}", vocab)
        row = CacheReader(tmp_path / f"cache-{name}").read(3)
        assert (row.ids > 65535).any()
        assert np.array_equal(row.ids, teacher_logits(samples, 3, vocab).topk(7)[1].numpy())
    with pytest.raises(CacheError, match=r"vocabulary of 131073: its ids have 17 bits and end at 131072"):
        opened(tmp_path / "first", samples, vocab + 1)


def test_nucleus_leaves_slots_unused(samples: SampleSet, tmp_path: Path) -> None:
    write_first_layout(tmp_path / "tars", samples, p=0.9, k=12, cp=2)
    run(tmp_path / "tars", samples, tmp_path / "cache")
    assert verify(tmp_path / "cache", "deep").ok
    reader = CacheReader(tmp_path / "cache")
    widths = set()
    for sample in range(len(samples)):
        row = reader.read(sample)
        values, ids = torch.log_softmax(teacher_logits(samples, sample), -1).topk(12)
        p = values.exp()
        keep = ((p.cumsum(-1) - p) < 0.9).numpy()
        assert np.array_equal(row.ids, np.where(keep, ids.numpy(), -1))
        assert np.array_equal(row.logprobs == -np.inf, ~keep)
        widths |= set(keep.sum(-1).tolist())
    assert len(widths) > 3 and max(widths) <= 12


def test_order_must_be_trusted(samples: SampleSet, tars: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"carry no tokens.*--trust-order"):
        import_cache(opened(tars, samples), samples, tmp_path / "cache", vocab_size=VOCAB)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("order", [[*range(1, 32), 0], [*range(31, -1, -1)]], ids=["shifted", "reversed"])
def test_another_order_is_found_out(tmp_path: Path, order: list[int]) -> None:
    samples = make_samples(tmp_path / "samples", 32, length=96)
    write_first_layout(tmp_path / "tars", samples, order=order)
    with pytest.raises(CacheError, match="do not belong to sample"):
        run(tmp_path / "tars", samples, tmp_path / "cache")
    assert verify(tmp_path / "cache", "inventory").rows_committed == 0


def test_one_exchanged_pair_is_found_out(tmp_path: Path) -> None:
    samples = make_samples(tmp_path / "samples", 8, length=96)
    write_first_layout(tmp_path / "tars", samples, order=[0, 1, 2, 3, 4, 5, 7, 6])
    with pytest.raises(CacheError, match="do not belong to sample 6"):
        run(tmp_path / "tars", samples, tmp_path / "cache")
    assert verify(tmp_path / "cache", "inventory").rows_committed == 5


def test_resumes_with_what_is_missing(samples: SampleSet, tars: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(tars, samples, cache)
    kept = {path.name: path.read_bytes() for path in (cache / "commits").iterdir()}
    (cache / "commits" / "000001.json").unlink()
    report = run(tars, samples, cache)
    assert (report.rows_imported, report.tokens_imported) == (5, 5 * LENGTH)
    again = {path.name: path.read_bytes() for path in (cache / "commits").iterdir()}
    assert again.keys() == kept.keys()
    assert [name for name in kept if again[name] != kept[name]] == ["000001.json"]
    assert_is_the_teacher(cache, samples, 5)
    assert run(tars, samples, cache).rows_imported == 0


def test_a_changed_source_is_another_cache(samples: SampleSet, tars: Path, tmp_path: Path) -> None:
    run(tars, samples, tmp_path / "cache")
    write_first_layout(tmp_path / "other", samples, k=4)
    with pytest.raises(CacheError, match=r"holds another cache: teacher\.source\.\S+ there: "):
        run(tmp_path / "other", samples, tmp_path / "cache")


def test_surplus_of_a_last_batch(samples: SampleSet, tmp_path: Path) -> None:
    write_first_layout(tmp_path / "tars", samples, dp=2, micro_batches=5, order=[*range(16), 0, 1, 2, 3])
    assert run(tmp_path / "tars", samples, tmp_path / "cache").surplus_rows == 4
    write_first_layout(tmp_path / "long", samples, order=[*range(16), 0, 1])
    with pytest.raises(CacheError, match=r"holds 18 rows, .* only 16 samples"):
        opened(tmp_path / "long", samples)


def test_the_run_began_later(samples: SampleSet, tmp_path: Path) -> None:
    write_first_layout(tmp_path / "tars", samples, first_iteration=100)
    with pytest.raises(CacheError, match=r"lacks iterations 0, 1, 2, 3, 4 and 95 more.*--first-iteration"):
        opened(tmp_path / "tars", samples)
    with pytest.raises(CacheError, match=r"holds iteration 100, before --first-iteration"):
        opened(tmp_path / "tars", samples, first_iteration=101)
    run(tmp_path / "tars", samples, tmp_path / "cache", first_iteration=100)
    assert_is_the_teacher(tmp_path / "cache", samples, 5)


def test_the_second_layout_has_no_iterations(samples: SampleSet, tmp_path: Path) -> None:
    write_second_layout(tmp_path / "tars", samples)
    with pytest.raises(CacheError, match=r"tars names its files by samples, not by iterations: leave out --first-it"):
        opened(tmp_path / "tars", samples, first_iteration=100)
    assert opened(tmp_path / "tars", samples, first_iteration=0).surplus_rows == 0


def test_missing_tars_of_the_first_layout(samples: SampleSet, copied: Path) -> None:
    (copied / "cp1_dp0__1.tar").unlink()
    with pytest.raises(CacheError, match=r"lacks iteration 0 of cp1_dp0, iteration 1 of cp1_dp0$"):
        opened(copied, samples)
    for name in ("cp0_dp0", "cp0_dp1", "cp1_dp1"):
        (copied / f"{name}__1.tar").unlink()
    with pytest.raises(CacheError, match=r"is incomplete: it lacks iterations 0, 1\. Rows behind a gap"):
        opened(copied, samples)
    (copied / "cp1_dp0__3.tar").unlink()
    with pytest.raises(CacheError, match=r"has no tars of cp1_dp0$"):
        opened(copied, samples)


def test_missing_last_tars(samples: SampleSet, copied: Path) -> None:
    for path in copied.glob("*__3.tar"):
        path.unlink()
    with pytest.raises(CacheError, match=r"holds 8 rows, .* 16 samples; samples 8 to 15 are missing"):
        opened(copied, samples)


def test_gaps_and_overlaps_of_the_second_layout(samples: SampleSet, tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    write_second_layout(folder, samples, dp=2, batch=4)
    entries = read_tar(folder / "dp0__0-8.tar")
    (folder / "dp1__8-16.tar").rename(tmp_path / "kept")
    with pytest.raises(CacheError, match=r"lacks samples 8-12 of dp1, samples 12-16 of dp1"):
        opened(folder, samples)
    (tmp_path / "kept").rename(folder / "dp1__8-16.tar")
    for rank in (0, 1):
        content = read_tar(folder / f"dp{rank}__0-8.tar")
        del content["0-4.pt.zst"]
        write_tar(folder / f"dp{rank}__0-8.tar", content)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match=r"lacks samples 0-4$"):
        opened(folder, samples)
    write_tar(folder / "dp0__0-6.tar", {"_meta.json": entries["_meta.json"], "0-6.pt.zst": entries["0-4.pt.zst"]})
    write_tar(folder / "dp1__0-6.tar", {"_meta.json": entries["_meta.json"], "0-6.pt.zst": entries["0-4.pt.zst"]})
    with pytest.raises(CacheError, match=r"samples 4 to 5 are in two spans"):
        opened(folder, samples)


def test_two_of_one_part(samples: SampleSet, copied: Path) -> None:
    shutil.copy(copied / "cp0_dp0__3.tar", copied / "cp0_dp0__7.tar")
    with pytest.raises(CacheError, match=r"cp0_dp0__7\.tar: 2\.pt\.zst is there a second time, in cp0_dp0__3\.tar"):
        opened(copied, samples)


def test_settings_that_do_not_fit(samples: SampleSet, tars: Path, copied: Path, tmp_path: Path) -> None:
    longer = make_samples(tmp_path / "longer", 16, length=32)
    with pytest.raises(CacheError, match=r"holds rows of 16 positions, .* of 32 tokens"):
        opened(tars, longer)
    with pytest.raises(CacheError, match=r"--vocab-size 50 is less than the 90 tokens"):
        import_cache(opened(tars, samples, 50), samples, tmp_path / "c", vocab_size=50, trust_order=True)
    other = read_tar(copied / "cp0_dp0__3.tar")
    meta = json.loads(other["_meta.json"])
    write_tar(copied / "cp0_dp0__3.tar", {**other, "_meta.json": json.dumps({**meta, "hash": "0"})})
    with pytest.raises(CacheError, match=r"cp0_dp0__3\.tar is of another run than cp0_dp0__1\.tar"):
        opened(copied, samples)


def test_ids_outside_the_vocabulary_are_named(samples: SampleSet, copied: Path, tmp_path: Path) -> None:
    values = torch.full((LENGTH // 2, 1, 2), -1.0)
    low = torch.tensor([3, 90], dtype=torch.uint16).expand(LENGTH // 2, 1, 2).contiguous()
    change(copied / "cp0_dp0__1.tar", "0.pt.zst", [values.half()] * 2, [low] * 2)
    with pytest.raises(CacheError, match=r"0\.pt\.zst, row 0: sample 0: id 90 at position 0 is outside .* 90"):
        run(copied, samples, tmp_path / "cache")


def change(tar: Path, name: str, values: list[Any], low: list[Any], **more: Any) -> None:
    """Puts other tensors into a member."""
    tensors = {"values": values, "indices_low": low, "bit_17": [part.to(torch.int32) > 65535 for part in low], **more}
    write_tar(tar, {**read_tar(tar), name: saved(tensors)})


@pytest.mark.parametrize(
    ("values", "low", "words"),
    [
        ([-1.0, -1.0], [4, 4], "names an id twice"),
        ([0.5, -1.0], [4, 5], "add up to"),
        ([-0.1, -0.1], [4, 5], "add up to"),
        ([float("nan"), -1.0], [4, 5], "is NaN or infinite"),
        ([-1000.0, -1000.0], [4, 5], "holds no probability at all"),
        ([-2.0, -0.5], [4, 5], ""),
    ],
)
def test_what_is_no_distribution(
    samples: SampleSet, copied: Path, tmp_path: Path, values: list[float], low: list[int], words: str
) -> None:
    shape = (LENGTH // 2, 1, 2)
    wrong = torch.tensor(values).expand(shape).contiguous().half()
    for c in range(2):
        ids = torch.tensor(low, dtype=torch.uint16).expand(shape).contiguous()
        change(copied / f"cp{c}_dp0__1.tar", "0.pt.zst", [wrong] * 2, [ids] * 2)
    if words:
        with pytest.raises(CacheError, match=rf"cp0_dp0__1\.tar: 0\.pt\.zst, row 0: .*{words}"):
            run(copied, samples, tmp_path / "cache")
    else:
        run(copied, samples, tmp_path / "cache")
        row = CacheReader(tmp_path / "cache").read(0)
        assert row.ids[3].tolist() == [5, 4, -1, -1, -1]
        assert row.logprobs[3].tolist() == [-0.5, -2.0, -np.inf, -np.inf, -np.inf]
        assert row.tail_logmass[3] == pytest.approx(-1.3542762, rel=1e-6)  # log(1 − e^−0.5 − e^−2)
