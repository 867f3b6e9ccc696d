"""Importing DistillKit's Parquet: rows packed bit by bit as the format is specified come out at the right sample."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_kd.cache.importers import distillkit, import_cache, open_source
from megatron_kd.cache.importers.convert import convert
from megatron_kd.cache.importers.distillkit_codec import (
    Compression,
    ResidualBin,
    decode_ids,
    decode_logprobs,
    read_compression,
    unpack_bits,
)
from megatron_kd.cache.importers.source import SourceRow
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.verify import verify
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from tests.unit.cache_import_sources import LENGTH, VOCAB, make_samples, teacher_logits

EXACT: dict[str, Any] = {
    "d": VOCAB,
    "k": 6,
    "exact_k": 6,
    "exact_dtype": "float32",
    "residual_bins": [],
    "delta_encoding": False,
}


def bits_of(numbers: list[int], width: int) -> list[int]:
    """Bytes of numbers written one behind the other as binary digits."""
    digits = "".join(format(number, f"0{width}b") for number in numbers)
    digits += "0" * (-len(digits) % 8)
    return [int(digits[i : i + 8], 2) for i in range(0, len(digits), 8)]


def id_width(d: int) -> int:
    return (d - 1).bit_length()


def exact_bytes(values: np.ndarray, dtype: str) -> list[int]:
    """Values as they are, or their differences, in one type."""
    if dtype == "bfloat16":
        return list(torch.from_numpy(values.astype("f4")).bfloat16().view(torch.uint8).tolist())
    return list(values.astype({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]).tobytes())


def write_parquet(
    path: Path, samples: SampleSet, order: list[int], settings: dict[str, Any], *, group_rows: int = 3
) -> None:
    """Rows of some samples in an order, all k values exact, and the settings beside them."""
    pa = pytest.importorskip("pyarrow", reason="writes the files: pip install -e '.[dev]'")
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {"input_ids": [], "compressed_logprobs": [], "bytepacked_indices": []}
    for sample in order:
        values, ids = torch.log_softmax(teacher_logits(samples, sample), -1).topk(settings["k"])
        stored = values[:-1].numpy()
        if settings["delta_encoding"]:
            stored = np.concatenate([stored[:, :1], np.diff(stored, axis=1)], 1)
        columns["input_ids"].append(samples.tokens(sample).tolist())
        columns["compressed_logprobs"].append([exact_bytes(row, settings["exact_dtype"]) for row in stored])
        columns["bytepacked_indices"].append([bits_of(row, id_width(settings["d"])) for row in ids[:-1].tolist()])
    nested = pa.list_(pa.list_(pa.uint8()))
    schema = pa.schema([("input_ids", pa.list_(pa.uint64())), *((name, nested) for name in list(columns)[1:])])
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(columns, schema=schema), path, row_group_size=group_rows)
    (path.parent / "compression_config.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples") / "set", 12)


def run(folder: Path, samples: SampleSet, cache: Path, vocab: int = VOCAB) -> Any:
    source = open_source("distillkit", folder, samples, vocab_size=vocab)
    return import_cache(source, samples, cache, vocab_size=vocab, rows_per_shard=5)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rows_are_found_by_their_tokens(samples: SampleSet, tmp_path: Path, dtype: str, delta: bool) -> None:
    settings = {**EXACT, "exact_dtype": dtype, "delta_encoding": delta}
    write_parquet(tmp_path / "data" / "b.parquet", samples, [7, 3, 11, 0, 5], settings)
    write_parquet(tmp_path / "data" / "a.parquet", samples, [10, 9, 8, 6, 4, 2, 1, 3], settings)
    report = run(tmp_path / "data", samples, tmp_path / "cache")
    assert (report.rows_imported, report.matched_by, report.surplus_rows) == (12, "tokens", 1)
    assert verify(tmp_path / "cache", "deep").problems == []
    reader = CacheReader(tmp_path / "cache")
    expected_dtype = "float32" if dtype == "float64" else dtype
    assert (reader.manifest.value_dtype, reader.manifest.top_k) == (expected_dtype, 6)
    for sample in range(12):
        row = reader.read(sample, samples.row_hash(sample))
        values, ids = torch.log_softmax(teacher_logits(samples, sample).double(), -1).topk(6)
        assert np.array_equal(row.ids[:-1], ids[:-1].numpy())
        error = {"float16": 2**-11, "bfloat16": 2**-8}.get(dtype, 1e-6) * (6 if delta else 1)
        np.testing.assert_allclose(row.logprobs[:-1].astype("f8"), values[:-1].numpy(), rtol=error, atol=error / 2)
        # Nothing was scored behind the last token: no candidates, all mass outside, no weight.
        assert (row.ids[-1] == -1).all() and row.tail_logmass[-1] == 0 and row.loss_mask[-1] == 0
        assert np.array_equal(row.loss_mask[:-1], samples.loss_mask(sample)[:-1])


def test_missing_samples_are_named(samples: SampleSet, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", samples, [3, 5, 7, 8], EXACT)
    with pytest.raises(CacheError, match=r"none of its 4 rows has the tokens of samples 0, 1, 2, 4, 6 and 3 more"):
        run(tmp_path / "data", samples, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_settings_of_another_file(samples: SampleSet, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", samples, list(range(12)), EXACT)
    config = tmp_path / "data" / "compression_config.yaml"
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"k": 5, "exact_k": 5},
            r"row 0 of row group 0: positions have \[24\] bytes of uint8, 20 by compression_config",
        ),
        ({"d": 300}, r"positions have \[6\] bytes of uint8, 7 by"),
        ({"d": 64}, r"d 64 makes ids of 6 bits, too few for a vocabulary of 90"),
        ({"exact_dtype": "float16", "exact_k": 6}, r"positions have \[24\] bytes of uint8, 12 by"),
    ]
    for changed, words in cases:
        config.write_text(yaml.safe_dump({**EXACT, **changed}))
        with pytest.raises(CacheError, match=words):
            run(tmp_path / "data", samples, tmp_path / "cache")
    config.unlink()
    with pytest.raises(CacheError, match=r"compression_config\.yaml cannot be read .*its bytes mean nothing"):
        run(tmp_path / "data", samples, tmp_path / "cache")
    config.write_text("a: [")
    with pytest.raises(CacheError, match="is not YAML"):
        run(tmp_path / "data", samples, tmp_path / "cache")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"k": 0}, "k is 0, must be an integer from 1"),
        ({"k": True}, "k is True"),
        ({"exact_k": 7}, "k is 6, must be at least exact_k 7"),
        ({"d": 2**40}, "d is 1099511627776"),
        ({"exact_dtype": "int8"}, "exact_dtype is 'int8', must be one of float16, bfloat16, float32, float64"),
        ({"polynomial_terms": ["sin"]}, "polynomial_terms is 'sin'"),
        ({"polynomial_terms": [10**9]}, "polynomial_terms is 1000000000"),
        ({"residual_bins": [{"element_bits": 4}]}, "residual_bins need scale_dtype, element_bits and num_elements"),
        (
            {"exact_k": 5, "residual_bins": [{"scale_dtype": "float16", "element_bits": 4, "num_elements": 2}]},
            "at most k",
        ),
        ({"exact_k": 5, "residual_bins": [{"scale_dtype": "float16", "element_bits": 65, "num_elements": 1}]}, "65"),
        ({"delta_encoding": 1}, "delta_encoding is 1, must be true or false"),
        ({"exact_dtype": ["float16"]}, r"exact_dtype is \['float16'\], must be one of"),
        ({"residual_bins": 3}, "residual_bins is 3, must be a list"),
        ({"polynomial_terms": [[1]]}, r"polynomial_terms is \[1\], must be sqrt, exp or a power"),
        ({"more": 1}, "look at more"),
    ],
)
def test_settings_that_cannot_be(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CacheError, match=words):
        read_compression({**EXACT, **changed}, "here")
    for wrong in ("text", {"k": 1}):
        with pytest.raises(CacheError, match=r"^here (holds no settings|is not a compression)"):
            read_compression(wrong, "here")


@pytest.mark.parametrize("bits", [1, 3, 8, 13, 17, 18, 33, 64])
def test_bits_against_binary_digits(bits: int) -> None:
    rng = np.random.default_rng(bits)
    numbers = [[int(rng.integers(0, 2**63)) * 2 % 2**bits for _ in range(7)] for _ in range(5)]
    packed = np.array([bits_of(row, bits) for row in numbers], "u1")
    assert unpack_bits(packed, bits, 7).tolist() == numbers


def test_one_position_by_hand() -> None:
    """Two exact float16 values, a straight line, and two residual bins, one of them of single bits."""
    compression = Compression(
        d=1000,
        k=8,
        exact_k=2,
        exact_dtype="float16",
        polynomial_terms=(0, 1, "sqrt"),
        term_dtype="float32",
        residual_bins=(ResidualBin("float16", 3, 3), ResidualBin("float32", 1, 2)),
        delta_encoding=False,
    )
    packed = struct.pack("<2e3f", -0.5, -1.5, -2.0, -0.25, -1.0)
    packed += struct.pack("<e", 0.125) + bytes(bits_of([0, 4, 7], 3))
    packed += struct.pack("<f", 0.0625) + bytes(bits_of([1, 0], 1))
    assert compression.logprob_bytes == len(packed)
    line = [-2.0 - 0.25 * t - 1.0 * t**0.5 for t in range(6)]
    residual = [0.125 * (0 - 4), 0.125 * (4 - 4), 0.125 * (7 - 4), 0.0625, -0.0625, 0.0]
    expected = np.array([-0.5, -1.5, *(a + b for a, b in zip(line, residual, strict=True))])
    decoded = decode_logprobs(np.frombuffer(packed, "u1")[None], compression)
    np.testing.assert_allclose(decoded[0], expected, rtol=2**-11)
    ids = [999, 0, 512, 3, 255, 256, 1, 998]
    assert compression.id_bits == 10
    packed_ids = np.array([bits_of(ids, 10)], "u1")
    assert packed_ids.shape == (1, compression.id_bytes)
    assert decode_ids(packed_ids, compression).tolist() == [ids]


def test_normalised_terms_and_differences_by_hand() -> None:
    compression = Compression(
        d=8, k=5, exact_k=1, exact_dtype="float32", polynomial_terms=("exp", 2), delta_encoding=True, normalize_t=True
    )
    packed = np.frombuffer(struct.pack("<3f", -0.75, -0.5, -0.25), "u1")[None]
    t = [0, 1 / 3, 2 / 3, 1]
    steps = [-0.75, *(-0.5 * np.exp(x) - 0.25 * x**2 for x in t)]
    np.testing.assert_allclose(decode_logprobs(packed, compression)[0], np.cumsum(steps), rtol=1e-6)


def test_lossy_sums_are_scaled_down_to_one(samples: SampleSet) -> None:
    values = np.full((LENGTH, 2), np.log(0.51))
    found = SourceRow("here", np.tile([1, 2], (LENGTH, 1)), values)
    options: dict[str, Any] = {"top_k": 3, "vocab_size": VOCAB, "value_dtype": "float32"}
    done = convert(0, found, samples, lossy=True, **options)
    assert (done.scaled, done.floored) == (LENGTH, LENGTH)
    np.testing.assert_allclose(done.row.logprobs[:, :2], np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(done.row.tail_logmass, np.log(1e-8), rtol=1e-6)
    with pytest.raises(CacheError, match=r"^here: sample 0 is not a row .* add up to 1\.02"):
        convert(0, found, samples, lossy=False, **options)
    with pytest.raises(CacheError, match=r"^here: sample 0: the probabilities of position 0 add up to 1\.2;"):
        convert(0, SourceRow("here", found.ids, np.full((LENGTH, 2), np.log(0.6))), samples, lossy=True, **options)
    with pytest.raises(CacheError, match=r"sample 0 has 16 tokens, the source scored 14 positions"):
        convert(0, SourceRow("here", found.ids[:14], values[:14]), samples, lossy=True, **options)
    whole = np.log(np.full((LENGTH, VOCAB), 1 / VOCAB))
    everything = SourceRow("here", np.tile(np.arange(VOCAB), (LENGTH, 1)), whole)
    row = convert(0, everything, samples, lossy=True, **{**options, "top_k": VOCAB}).row
    assert (row.tail_logmass == -np.inf).all()


def test_damaged_files(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "data" / "a.parquet"
    write_parquet(path, samples, list(range(12)), EXACT)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    good = path.read_bytes()
    for content in (b"", b"PAR1", good[:-7], good[: len(good) // 2], b"\0" * len(good)):
        path.write_bytes(content)
        with pytest.raises(CacheError, match=r"a\.parquet is not a readable Parquet file: "):
            run(path.parent, samples, tmp_path / "cache")
    pq.write_table(pa.table({"input_ids": [[1, 2]], "coeffs": [[1.0]]}), path)
    with pytest.raises(
        CacheError, match="has no column compressed_logprobs, bytepacked_indices, only input_ids, coeffs"
    ):
        run(path.parent, samples, tmp_path / "cache")
    nested = pa.array([[[1]] * 3, None], pa.list_(pa.list_(pa.uint8())))
    pq.write_table(pa.table({"input_ids": nested, "compressed_logprobs": nested, "bytepacked_indices": nested}), path)
    with pytest.raises(CacheError, match="with 1 nulls, lists without any belong there"):
        run(path.parent, samples, tmp_path / "cache")
    pq.write_table(pa.table({"input_ids": [1, 2], "compressed_logprobs": nested, "bytepacked_indices": nested}), path)
    with pytest.raises(CacheError, match="a column is int64"):
        run(path.parent, samples, tmp_path / "cache")
    path.unlink()
    with pytest.raises(CacheError, match=r"holds no \.parquet files"):
        run(path.parent, samples, tmp_path / "cache")


def test_sizes_are_checked_before_reading(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "data" / "a.parquet", samples, list(range(12)), EXACT, group_rows=12)
    monkeypatch.setattr(distillkit, "MAX_GROUP_BYTES", 1000)
    with pytest.raises(CacheError, match=r"a\.parquet: row group 0 shall have [\d,]{5,} bytes, too many to read"):
        run(tmp_path / "data", samples, tmp_path / "cache")


def test_tokens_that_no_sample_can_have(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "data" / "a.parquet"
    write_parquet(path, samples, list(range(12)), EXACT)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    for change, kind in ((2**32, pa.uint64()), (-(2**32), pa.int64())):
        rows = [[token + change for token in row] for row in table.column("input_ids").to_pylist()]
        pq.write_table(table.set_column(0, "input_ids", pa.array(rows, pa.list_(kind))), path)
        with pytest.raises(CacheError, match=r"none of its 12 rows has the tokens of samples 0, 1, 2, 3, 4 and 7 more"):
            run(path.parent, samples, tmp_path / "cache")
    floats = pa.array([[0.5] * LENGTH] * 12, pa.list_(pa.float32()))
    pq.write_table(table.set_column(0, "input_ids", floats), path)
    with pytest.raises(CacheError, match=r"input_ids are list<.*float>, lists of integers belong there"):
        run(path.parent, samples, tmp_path / "cache")


def test_iterations_are_of_another_format(samples: SampleSet, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"^--first-iteration is for megatron-lm: rows of distillkit are found by"):
        open_source("distillkit", tmp_path, samples, vocab_size=VOCAB, first_iteration=1)


def test_without_pyarrow(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(CacheError, match=r"^reading Parquet needs pyarrow: pip install 'megatron-kd\[parquet\]'$"):
        open_source("distillkit", tmp_path, samples, vocab_size=VOCAB)
