"""The set of samples on disk: what is read is what was written, and nothing half-written or foreign is taken."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megatron_kd.cache.identity import row_hash
from megatron_kd.data import sample_writer
from megatron_kd.data.npy import NpyWriter
from megatron_kd.data.packing import PackedRow, concatenate
from megatron_kd.data.sample_writer import find_samples, sample_request, write_samples
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.errors import DataError

L, V = 16, 100
REQUEST: dict[str, Any] = {
    "seq_length": L,
    "packing": "concatenate",
    "tokenizer_identity": {"name": "tiny", "vocab_size": V, "sha256": "ab"},
    "corpus_identity": {"format": "text", "fingerprint": "cd"},
    "selection": {"seed": 0},
}


def make_rows(count: int, seed: int = 0) -> list[PackedRow]:
    generator = np.random.default_rng(seed)
    documents = [generator.integers(1, V, generator.integers(1, 30), dtype=np.int32) for _ in range(count * 3)]
    rows = list(concatenate(documents, L, 0))
    assert len(rows) >= count
    return rows[:count]


def write(path: Path, **changes: Any) -> SampleSet:
    splits = {"train": iter(make_rows(300)), "heldout": iter(make_rows(7, seed=1))}
    return write_samples(path, splits, **(REQUEST | changes))


def never() -> Iterator[PackedRow]:
    raise AssertionError("the rows of an existing set are not to be made again")
    yield


def test_reads_what_was_written(tmp_path: Path) -> None:
    rows = make_rows(300) + make_rows(7, seed=1)
    write(tmp_path / "deep" / "samples")
    samples = open_samples(tmp_path / "deep" / "samples")
    assert len(samples) == 307
    assert samples.splits == {"train": range(300), "heldout": range(300, 307)}
    assert (samples.seq_length, samples.vocab_size, samples.tokenizer_identity["name"]) == (L, V, "tiny")
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(samples.tokens(i), row.tokens)
        np.testing.assert_array_equal(samples.loss_mask(i), row.loss_mask)
        np.testing.assert_array_equal(samples.document_offsets(i), row.document_offsets)
        assert samples.row_hash(i) == row_hash(row.tokens, row.document_offsets)
    batch = samples.rows([306, 0, 255, 256, 0])
    assert (batch.tokens.dtype, batch.loss_mask.dtype, batch.document_offsets[0].dtype) == (
        np.int32,
        np.uint8,
        np.int32,
    )
    for place, i in enumerate([306, 0, 255, 256, 0]):
        np.testing.assert_array_equal(batch.tokens[place], rows[i].tokens)
        np.testing.assert_array_equal(batch.loss_mask[place], rows[i].loss_mask)
        np.testing.assert_array_equal(batch.document_offsets[place], rows[i].document_offsets)
    batch.tokens[:] = 0  # copies
    samples.tokens(0)[:] = 0
    samples.verify()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["samples"]


def test_a_file_that_breaks_while_it_is_open_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    """A mapped page of it would end the process."""
    for name, damage, words in (
        ("tokens", lambda file: os.truncate(file, 4096), r"tokens\.npy is truncated \(no bytes from 19712 on\)"),
        ("loss_mask", lambda file: os.truncate(file, 0), r"loss_mask\.npy is truncated"),
        ("row_offsets", lambda file: file.write_bytes(b"\xff" * file.stat().st_size), r"row_offsets\.npy is damaged"),
    ):
        write(tmp_path / name)
        samples = open_samples(tmp_path / name)
        one = samples.loss_mask if name == "loss_mask" else samples.row_hash
        samples.rows([0, 306])
        damage(tmp_path / name / f"{name}.npy")
        with pytest.raises(DataError, match=words):
            samples.rows([0, 306])
        with pytest.raises(DataError, match=name):
            one(306)
    with pytest.raises(DataError, match=r"loss_mask\.npy is missing or damaged"):
        open_samples(tmp_path / "loss_mask")


def test_opened_samples_are_those_that_were_opened(tmp_path: Path) -> None:
    write(tmp_path / "samples")
    samples = open_samples(tmp_path / "samples")
    (tmp_path / "samples").rename(tmp_path / "old")
    write_samples(tmp_path / "samples", {"train": iter(make_rows(307, seed=5))}, **REQUEST)
    np.testing.assert_array_equal(samples.rows([5]).tokens[0], make_rows(300)[5].tokens)
    assert len(samples.rows([]).tokens) == 0


def test_the_row_hash_is_the_one_caches_use(tmp_path: Path) -> None:
    samples = write(tmp_path / "samples")
    i = 300
    data = (
        b"\x01\0\0\0" + samples.tokens(i).astype("<i4").tobytes() + samples.document_offsets(i).astype("<i4").tobytes()
    )
    assert samples.row_hash(i) == xxhash.xxh3_128_digest(data)


def test_token_counts(tmp_path: Path) -> None:
    samples = write(tmp_path / "samples")
    train = samples.token_counts("train")
    assert train.dtype == np.int64 and train.shape == (V,)
    tokens = np.concatenate([row.tokens for row in make_rows(300)])
    assert train.tolist() == [int((tokens == v).sum()) for v in range(V)]
    np.testing.assert_array_equal(samples.token_counts(), train + samples.token_counts("heldout"))
    with pytest.raises(DataError, match="no split 'valid', only train, heldout"):
        samples.token_counts("valid")


def test_the_same_request_is_reused_and_another_refused(tmp_path: Path) -> None:
    written = write(tmp_path / "samples")
    again = write_samples(tmp_path / "samples", {"train": never()}, **REQUEST)
    assert again.manifest == written.manifest
    renamed = {**REQUEST["tokenizer_identity"], "name": "the same from another folder"}
    write_samples(tmp_path / "samples", {"train": never()}, **(REQUEST | {"tokenizer_identity": renamed}))
    other = {"seq_length": 32, "corpus_identity": {"format": "text", "fingerprint": "ef"}}
    with pytest.raises(DataError) as caught:
        write_samples(tmp_path / "samples", {"train": never()}, **(REQUEST | other))
    message = str(caught.value)
    assert "seq_length is 16 there, 32 asked" in message
    assert "corpus.fingerprint is 'cd' there, 'ef' asked" in message
    assert "packing" not in message
    assert "Remove the folder or choose another data.samples" in message


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match=r"is not a set of samples \(no samples.json\)"):
        write(tmp_path / "samples")
    assert (tmp_path / "samples" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert len(write(tmp_path / "empty")) == 307


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[PackedRow]:
        yield from make_rows(300)
        raise DataError("the corpus broke")

    with pytest.raises(DataError, match="the corpus broke"):
        write_samples(tmp_path / "samples", {"train": failing()}, **REQUEST)
    bad = make_rows(1)[0]
    bad.tokens[3] = V
    with pytest.raises(DataError, match="outside the tokenizer's vocabulary of 100"):
        write_samples(tmp_path / "samples", {"train": [bad]}, **REQUEST)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_race_takes_the_winners_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples"

    def rows_while_another_publishes() -> Iterator[PackedRow]:
        write(path)
        yield from make_rows(300)

    samples = write_samples(path, {"train": rows_while_another_publishes()}, **REQUEST)
    assert len(samples) == 307  # the winner's, which has a held-out split
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_split(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "samples", {"train": make_rows(3), "heldout": []}, **REQUEST)
    assert samples.splits == {"train": range(3), "heldout": range(3, 3)}
    assert samples.token_counts("heldout").sum() == 0
    nothing = write_samples(tmp_path / "nothing", {"train": []}, **REQUEST)
    assert len(nothing) == 0
    nothing.verify()


def test_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    samples = write(path)
    for sample in (-1, 307):
        with pytest.raises(DataError, match=f"sample {sample} does not exist: .* holds samples 0 to 306"):
            samples.tokens(sample)
        with pytest.raises(DataError, match="does not exist"):
            samples.rows([0, sample])

    tokens = path / "tokens.npy"
    whole = tokens.read_bytes()
    flipped = bytearray(whole)
    flipped[-1 - 4 * L] ^= 1
    tokens.write_bytes(flipped)
    with pytest.raises(DataError, match="content hash differs"):
        open_samples(path).verify()
    tokens.write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"tokens\.npy is missing or damaged"):
        open_samples(path)
    np.save(tokens, np.zeros((306, L), np.int32))
    with pytest.raises(DataError, match=r"tokens\.npy holds int32 \(306, 16\), samples\.json says int32 \(307, 16\)"):
        open_samples(path)
    tokens.unlink()
    with pytest.raises(DataError, match=r"tokens\.npy is missing"):
        open_samples(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "samples")
    manifest_file = tmp_path / "samples" / "samples.json"
    manifest = json.loads(manifest_file.read_text())
    manifest_file.write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(DataError, match="format version 99, this program reads 1"):
        open_samples(tmp_path / "samples")
    manifest_file.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_samples(tmp_path / "samples")
    with pytest.raises(DataError, match="prepare them first"):
        open_samples(tmp_path / "nowhere")


def test_find_samples(tmp_path: Path) -> None:
    request = sample_request(**REQUEST)
    assert find_samples(tmp_path / "samples", request) is None
    write(tmp_path / "samples")
    found = find_samples(tmp_path / "samples", request)
    assert found is not None and len(found) == 307


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_npy_writer_grows(tmp_path: Path, count: int) -> None:
    expected = np.arange(count * 3, dtype=np.int32).reshape(count, 3)
    with NpyWriter(tmp_path / "a.npy", np.dtype(np.int32), (3,)) as writer:
        for start in range(0, count, 7):
            writer.append(expected[start : start + 7])
        with pytest.raises(ValueError, match="int32"):
            writer.append(np.zeros((1, 3), np.int64))
        with pytest.raises(ValueError, match="expected"):
            writer.append(np.zeros((1, 4), np.int32))
    read = np.load(tmp_path / "a.npy")
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, expected)
    with pytest.raises(FileExistsError):
        NpyWriter(tmp_path / "a.npy", np.dtype(np.int32))


def test_rows_are_streamed(tmp_path: Path) -> None:
    """What was yielded is on its way to the disk before the iterator ends."""
    sizes = []

    def rows() -> Iterator[PackedRow]:
        for row in make_rows(4 * sample_writer._ROWS_PER_WRITE):
            (folder,) = tmp_path.iterdir()
            sizes.append((folder / "tokens.npy").stat().st_size)
            yield row

    write_samples(tmp_path / "samples", {"train": rows()}, **REQUEST)
    assert sizes[-1] >= 2 * sample_writer._ROWS_PER_WRITE * L * 4
