"""Damaged and hostile tars: one clear error that names the file, before memory is asked for."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_kd.cache.importers import import_cache, open_source
from megatron_kd.cache.importers.payload import Member, decompressed, load_tensors, members, zstd_size
from megatron_kd.cache.reader import CacheReader
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from tests.unit.cache_import_sources import (
    VOCAB,
    make_samples,
    opened,
    read_tar,
    saved,
    teacher_logits,
    write_second_layout,
    write_tar,
)
from tests.unit.cache_rows import assert_rows_equal

zstandard = pytest.importorskip("zstandard", reason="writes the frames: pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples") / "set", 4)


@pytest.fixture(scope="module")
def whole(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One good tar of one span."""
    folder = tmp_path_factory.mktemp("whole") / "tars"
    write_second_layout(folder, samples)
    return (folder / "dp0__0-4.tar").read_bytes()


@pytest.fixture
def tar(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tars" / "dp0__0-4.tar"
    path.parent.mkdir()
    path.write_bytes(whole)
    return path


def attempt(tar: Path, samples: SampleSet) -> None:
    cache = tar.parent.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    import_cache(opened(tar.parent, samples), samples, cache, vocab_size=VOCAB, trust_order=True)


def refused(tar: Path, samples: SampleSet, words: str) -> None:
    with pytest.raises(CacheError, match=words) as caught:
        attempt(tar, samples)
    assert str(tar) in str(caught.value)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_refused_or_changes_no_row(tar: Path, whole: bytes, samples: SampleSet, data: Any) -> None:
    position = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[position] = data.draw(st.integers(0, 255))
    tar.write_bytes(changed)
    try:
        attempt(tar, samples)
    except CacheError as refusal:
        event(re.sub(r"[\d/]\S*", "…", str(refusal))[:60])
        return
    reader = CacheReader(tar.parent.parent / "cache")
    for sample in range(len(samples)):
        values, ids = torch.log_softmax(teacher_logits(samples, sample), -1).topk(5)
        row = reader.read(sample)
        assert np.array_equal(row.ids, ids.numpy()) and np.array_equal(row.logprobs, values.half().numpy())


@pytest.mark.parametrize("keep", [0, 100, 511, 512, 1000, 2000, 3000, -10240])
def test_a_cut_tar(tar: Path, whole: bytes, samples: SampleSet, keep: int) -> None:
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last member
    tar.write_bytes(whole[: keep if keep >= 0 else end])
    with pytest.raises(CacheError, match=r"copy it again|hold no rows|has no _meta"):
        attempt(tar, samples)


def test_a_member_of_a_petabyte(tar: Path, samples: SampleSet) -> None:
    entries = read_tar(tar)
    with tarfile.open(tar, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo("4-8.pt.zst")
        info.size = 10**15
        archive.fileobj.write(info.tobuf(tarfile.GNU_FORMAT))
    refused(tar, samples, r"4-8\.pt\.zst shall have 1000000000000000 bytes, which do not fit a file of \d+")


def test_a_damaged_header_is_not_taken_for_the_end(tar: Path, samples: SampleSet) -> None:
    write_tar(tar, {**read_tar(tar), "4-8.pt.zst": b"x"})
    with tarfile.open(tar) as archive:
        header = archive.getmember("4-8.pt.zst").offset
    damaged = bytearray(tar.read_bytes())
    damaged[header + 3] ^= 1
    tar.write_bytes(damaged)
    refused(tar, samples, rf"has no end mark behind byte {header}: the tar is cut off or damaged")


def test_spans_that_cannot_be(tar: Path, samples: SampleSet) -> None:
    good = read_tar(tar)
    write_tar(tar, {**good, "4-4.pt.zst": b"x"})
    refused(tar, samples, r"4-4\.pt\.zst is no span of samples")
    write_tar(tar, {**good, "4-7.pt.zst": b"x"})
    with pytest.raises(CacheError, match="has spans of 3 and of 4 samples: a batch size that changes"):
        attempt(tar, samples)


def test_more_than_the_rows_can_need(tar: Path, samples: SampleSet) -> None:
    rows = torch.zeros(16, 4, 5)
    tensors = {
        "values": rows.half(),
        "indices_low": rows.to(torch.uint16),
        "bit_17": torch.zeros(40, dtype=torch.uint8),
    }
    padding = torch.zeros(10**6)
    write_tar(tar, {**read_tar(tar), "0-4.pt.zst": saved({**tensors, "format_version": 2, "padding": padding})})
    refused(tar, samples, r"would decompress to 4,\d{3},\d{3} bytes, more than the 1,067,200 that it may hold")


def test_links_and_sparse_files_are_passed_over(tar: Path, samples: SampleSet) -> None:
    entries = read_tar(tar)
    with tarfile.open(tar, "w") as archive:
        for name, kind in (("9-13.pt.zst", tarfile.SYMTYPE), ("13-17.pt.zst", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        for name, content in {"../../escape.txt": b"x", "/tmp/escape.txt": b"x", **entries}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    attempt(tar, samples)
    assert not list(tar.parent.parent.rglob("escape.txt"))


def test_a_frame_that_would_fill_the_memory(tar: Path, samples: SampleSet) -> None:
    # A frame header of eight size bytes that promise 2^50.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstd_size(frame) == 2**50
    write_tar(tar, {**read_tar(tar), "0-4.pt.zst": frame})
    refused(tar, samples, r"would decompress to 1,125,899,906,842,624 bytes, more than")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65535 + 256, 65536 + 256, 10**6])
def test_the_size_in_a_frame_header(size: int) -> None:
    data = bytes(size)
    assert zstd_size(zstandard.ZstdCompressor(level=3).compress(data)) == size
    streamed = zstandard.ZstdCompressor().compressobj()
    assert zstd_size(streamed.compress(data) + streamed.flush()) is (None if size else size)
    assert zstd_size(data[:8]) is None


def test_frames_that_lie(tar: Path, samples: SampleSet, tmp_path: Path) -> None:
    entries = read_tar(tar)
    streamed = zstandard.ZstdCompressor().compressobj()
    write_tar(tar, {**entries, "0-4.pt.zst": streamed.compress(b"x" * 1000) + streamed.flush()})
    refused(tar, samples, r"0-4\.pt\.zst is damaged: it is no zstd frame of a stated size")
    write_tar(tar, {**entries, "0-4.pt.zst": entries["0-4.pt.zst"][:-20]})
    refused(tar, samples, r"0-4\.pt\.zst is damaged: ")
    frame = zstandard.ZstdCompressor(level=3).compress(b"a" * 300)
    (tmp_path / "twice").write_bytes(frame + frame)
    with pytest.raises(CacheError, match="is damaged"):
        decompressed(Member(tmp_path / "twice", "x", 0, 2 * len(frame)))
    (tmp_path / "twice").write_bytes(frame)
    with pytest.raises(CacheError, match=r"x is truncated: \d+ of"):
        decompressed(Member(tmp_path / "twice", "x", 0, 2 * len(frame)))
    assert decompressed(Member(tmp_path / "twice", "x", 0, len(frame)), 300) == b"a" * 300
    with pytest.raises(CacheError, match=r"decompress to 300 bytes, more than the 299"):
        decompressed(Member(tmp_path / "twice", "x", 0, len(frame)), 299)


class _Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harm-was-done"),))


def test_nothing_is_unpickled(tar: Path, samples: SampleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tar.parent)
    good = read_tar(tar)
    for harmful in (saved({"values": _Harmful()}), zstandard.ZstdCompressor().compress(pickle.dumps(_Harmful()))):
        write_tar(tar, {**good, "0-4.pt.zst": harmful})
        refused(tar, samples, r"0-4\.pt\.zst cannot be loaded as tensors")
    assert not Path("harm-was-done").exists()


def test_a_zip_that_swells(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"values": torch.zeros(10**6)}, buffer)
    swollen = io.BytesIO()
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(swollen, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert len(swollen.getvalue()) < 10**5
    with pytest.raises(CacheError, match="is not stored as it is"):
        load_tensors(swollen.getvalue(), "here")


def test_a_tensor_that_pretends(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"values": torch.zeros(1).expand(10**9)}, buffer)
    with pytest.raises(CacheError, match=r"here is damaged: values has \(1000000000,\) elements in \d+ bytes"):
        load_tensors(buffer.getvalue(), "here")


def test_other_contents(tar: Path, samples: SampleSet) -> None:
    good = read_tar(tar)
    tensors = {"values": torch.zeros(16, 4, 2), "indices_low": torch.zeros(16, 4, 2, dtype=torch.uint16)}
    tensors |= {"bit_17": torch.zeros(16, dtype=torch.uint8)}
    for wrong, words in [
        ([1, 2], "holds list, not the tensors"),
        ({**tensors}, "format version None, 2 can be read"),
        ({**tensors, "format_version": 2, "values": torch.zeros(15, 4, 2)}, r"values are \(15, 4, 2\), indices_low"),
        (
            {**tensors, "format_version": 2, "bit_17": torch.zeros(15, dtype=torch.uint8)},
            r"bit_17 is \(15,\) for 128 ids",
        ),
        ({**tensors, "format_version": 2, "values": torch.zeros(16, 4, 2).long()}, "holds int64 where float16 or"),
        ({**tensors, "format_version": 2, "values": "text"}, "holds str where float16 or"),
        ({"format_version": 2, "values": 1}, "holds int where float16 or"),
        ({"format_version": 2}, r"has no values as this layout keeps it: it holds \['format_version'\]"),
    ]:
        write_tar(tar, {**good, "0-4.pt.zst": saved(wrong)})
        refused(tar, samples, words)


def test_metadata_that_is_missing_or_wrong(tar: Path, samples: SampleSet) -> None:
    good = read_tar(tar)
    write_tar(tar, {"0-4.pt.zst": good["0-4.pt.zst"]})
    refused(tar, samples, r"has no _meta\.json")
    for text, words in [
        ("{", "is not JSON"),
        ('{"hash": NaN}', "is not JSON: NaN is no number"),
        ("[" * 10**5, "is not JSON"),
        ("[]", "does not say how it was saved"),
        (" " * 2**21, "far more than"),
    ]:
        write_tar(tar, {**good, "_meta.json": text})
        refused(tar, samples, words)
    meta = good["_meta.json"].decode()
    for old, new, words in [
        ('"fp16"', '"fp8"', "save_dtype 'fp8' must be one of fp16, bf16, fp32"),
        ('"fp16"', '["fp16"]', r"save_dtype \['fp16'\] must be one of"),
        ('"k": 5', '"k": 4', "holds 5 slots a position, its metadata says at most 4"),
        ('"k": 5', '"k": "5"', "saver.k in _meta.json is '5', not a size"),
        ('"mbs_save": 1', '"mbs_save": 3', "a multiple of the micro batch of 3"),
        ('"dp_size_save": 1', '"dp_size_save": 2', "1 of 2 data-parallel ranks have tars"),
    ]:
        assert old in meta
        write_tar(tar, {**good, "_meta.json": meta.replace(old, new)})
        with pytest.raises(CacheError, match=words):
            attempt(tar, samples)


def test_folders_that_are_no_source(tar: Path, samples: SampleSet, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"nowhere is not a folder: name the one that megatron-lm wrote"):
        opened(tmp_path / "nowhere", samples)
    with pytest.raises(CacheError, match="format 'parquet' cannot be imported, only megatron-lm, distillkit"):
        open_source("parquet", tmp_path, samples, vocab_size=VOCAB)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CacheError, match="holds no tars"):
        opened(tmp_path / "empty", samples)
    (tar.parent / "cp0_dp0__3.tar").write_bytes(tar.read_bytes())
    with pytest.raises(CacheError, match="mixes two layouts"):
        opened(tar.parent, samples)
    (tar.parent / "dp0__0-4.targets.tar").write_bytes(tar.read_bytes())
    with pytest.raises(CacheError, match=r"dp0__0-4\.targets\.tar has no name of a layout that can be read"):
        opened(tar.parent, samples)


def test_members_of_a_compressed_tar_are_not_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "dp0__0-4.tar", "w:gz"):
        pass
    with pytest.raises(CacheError, match="is not a readable tar"):
        list(members(tmp_path / "dp0__0-4.tar"))


def test_far_apart_numbers_are_counted_not_listed(tar: Path, samples: SampleSet) -> None:
    meta = read_tar(tar)["_meta.json"]
    tar.unlink()
    for number in (0, 10**17):
        write_tar(tar.parent / f"cp0_dp0__{number}.tar", {"_meta.json": meta, f"{number}.pt.zst": b""})
    with pytest.raises(CacheError, match=r"lacks iterations 1, 2, 3, 4, 5 and 99999999999999994 more"):
        opened(tar.parent, samples)
    (tar.parent / "cp0_dp0__0.tar").rename(tar.parent / "cp0_dp999999__0.tar")
    with pytest.raises(CacheError, match=r"has no tars of cp0_dp1, cp0_dp2, cp0_dp3, cp0_dp4, cp0_dp5"):
        opened(tar.parent, samples)


def test_a_truncated_shard_does_not_pass_for_imported(tar: Path, samples: SampleSet, tmp_path: Path) -> None:
    attempt(tar, samples)
    cache = tmp_path / "cache"
    before = [CacheReader(cache).read(sample) for sample in range(len(samples))]
    [file] = cache.glob("shards/000000-*/rank/c.0.0")
    file.write_bytes(file.read_bytes()[:50])

    def again() -> int:
        source = opened(tar.parent, samples)
        return import_cache(source, samples, cache, vocab_size=VOCAB, trust_order=True).rows_imported

    record = cache / "commits" / "000000.json"
    with pytest.raises(CacheError, match=rf"shard 0 is damaged: .*disk 50 bytes\. Remove {record} and import again"):
        again()
    record.unlink()
    assert again() == len(samples) and again() == 0
    for row in before:
        assert_rows_equal(CacheReader(cache).read(row.sample_id), row)
