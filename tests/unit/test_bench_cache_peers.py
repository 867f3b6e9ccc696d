"""The other formats of ``bench cache`` are those formats: read by others' readers, equal to others' writers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_kd.bench.cache_megatron import MAX_VOCAB_SIZE, MegatronLM, check_megatron_lm
from megatron_kd.bench.cache_parquet import Parquet
from megatron_kd.bench.peers import PeerUnavailableError
from megatron_kd.cache.row import Row
from tests.unit.cache_import_sources import LENGTH, make_samples, opened, read_tar, teacher_logits, write_first_layout
from tests.unit.cache_rows import make_row

ROWS, K = 3, 5


def scored_rows(folder: Path) -> tuple[list[Row], object]:
    """Samples, and the top K of ``teacher_logits`` on them as rows."""
    samples = make_samples(folder, ROWS)
    rows = []
    for i in range(ROWS):
        logprobs, ids = torch.log_softmax(teacher_logits(samples, i), -1).topk(K)
        rows.append(
            Row(
                sample_id=i,
                tokens=np.array(samples.tokens(i)),
                loss_mask=np.array(samples.loss_mask(i)),
                document_offsets=np.array(samples.document_offsets(i)),
                ids=ids.numpy().astype("i4"),
                logprobs=logprobs.numpy().astype("f2"),
                tail_logmass=torch.log1p(-logprobs.exp().sum(-1)).numpy().astype("f4"),
            )
        )
    return rows, samples


def test_the_tar_is_that_of_megatron_lms_saver(tmp_path: Path) -> None:
    """Against its hook on the teacher's logits: the same members, and in them the same bytes but for the metadata."""
    rows, samples = scored_rows(tmp_path / "samples")
    write_first_layout(tmp_path / "saver", samples, k=K, micro_batches=1, per_tar=ROWS)  # type: ignore[arg-type]
    MegatronLM().write(tmp_path / "ours", rows)
    saver, ours = (read_tar(tmp_path / name / f"cp0_dp0__{ROWS - 1}.tar") for name in ("saver", "ours"))
    assert list(saver) == list(ours) == ["_meta.json", *(f"{i}.pt.zst" for i in range(ROWS))]
    for name in list(ours)[1:]:
        assert ours[name] == saver[name], name


def test_the_importer_reads_the_tar(tmp_path: Path) -> None:
    rows, samples = scored_rows(tmp_path / "samples")
    MegatronLM().write(tmp_path / "tars", rows)
    source = opened(tmp_path / "tars", samples)  # type: ignore[arg-type]
    for row in rows:
        found = source.read(row.sample_id)
        assert np.array_equal(found.ids, row.ids) and np.array_equal(found.logprobs, row.logprobs)


def test_ids_beyond_16_bits(tmp_path: Path) -> None:
    row = make_row(0, LENGTH, unused=False)
    high = Row(**{**vars(row), "ids": row.ids + 65_500})
    MegatronLM().write(tmp_path / "tars", [high])
    assert np.array_equal(MegatronLM().open(tmp_path / "tars").read(0).ids, high.ids)
    check_megatron_lm(MAX_VOCAB_SIZE)
    with pytest.raises(PeerUnavailableError, match="does not fit"):
        check_megatron_lm(MAX_VOCAB_SIZE + 1)


def test_pyarrow_reads_the_parquet_file(tmp_path: Path) -> None:
    rows = [make_row(i, LENGTH) for i in range(ROWS)]
    Parquet(K).write(tmp_path / "a", rows)
    (path,) = (tmp_path / "a").iterdir()
    metadata = pq.read_metadata(path)
    assert (metadata.num_rows, metadata.num_row_groups) == (ROWS * LENGTH, ROWS)
    for column in range(2):
        described = metadata.row_group(0).column(column)
        assert "BYTE_STREAM_SPLIT" in described.encodings and described.compression == "ZSTD"
    table = pq.read_table(path)
    for name in ("ids", "logprobs", "tail_logmass", "tokens", "loss_mask"):
        wanted = np.concatenate([getattr(row, name) for row in rows])
        assert np.array_equal(np.array(table.column(name).to_pylist(), wanted.dtype), wanted), name
    starts = np.flatnonzero(table.column("document_start").to_numpy()[:LENGTH])
    assert np.array_equal(starts, rows[0].document_offsets)


def test_parquet_notices_a_flipped_bit(tmp_path: Path) -> None:
    rows = [make_row(i, LENGTH) for i in range(ROWS)]
    Parquet(K).write(tmp_path / "a", rows)
    (path,) = (tmp_path / "a").iterdir()
    column = pq.read_metadata(path).row_group(1).column(2)  # tail_logmass
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    path.write_bytes(data)
    stored = Parquet(K).open(tmp_path / "a")
    assert np.array_equal(stored.read(0).ids, rows[0].ids)
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        stored.read(1)


def test_without_the_peers_they_are_left_out(tmp_path: Path) -> None:
    """In a process in which neither pyarrow nor zstandard can be imported."""
    program = f"""
import sys
sys.modules["pyarrow"] = sys.modules["pyarrow.parquet"] = sys.modules["zstandard"] = None
from pathlib import Path
from megatron_kd.bench.cache import bench_cache
from tests.unit.cache_rows import make_cache
make_cache(Path({str(tmp_path / "cache")!r}), [32] * 4, 4)
report = bench_cache(cache=Path({str(tmp_path / "cache")!r}), rounds=1, rate_tokens=64, show_progress=False)
print([row["format"] for row in report.results])
print([note for note in report.notes if "left out" in note])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    formats, notes = done.stdout.splitlines()[-2:]
    assert formats == "['ours', 'ours', 'ours_plain_ids']"
    assert "megatron_lm is left out: its saver needs zstandard: pip install zstandard" in notes
    assert "parquet is left out: pyarrow is not installed" in notes
