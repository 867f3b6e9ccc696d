"""Other programs read what we write and we read what they write: zarr-python and tensorstore, both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xxhash
import zarr

from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.cache.array_writer import ArrayWriter
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.schema import ArraySpec, parse_array
from megatron_kd.cache.values import VALUE_DTYPES, from_patterns, to_patterns
from megatron_kd.errors import CacheError
from tests.unit.cache_rows import assert_rows_equal, folder_of, make_cache, rank_table, shards_folder

SPECS = [
    ArraySpec("wide", np.dtype("<u4"), (8, 3)),
    ArraySpec("patterns", np.dtype("<u2"), (4, 5)),
    ArraySpec("tail", np.dtype("<f4"), (16,)),
    ArraySpec("mask", np.dtype("u1"), (16,)),
    ArraySpec("offsets", np.dtype("<i8"), (4,)),
]
LENGTHS = [1, 15, 16, 17, 100]


def _values(spec: ArraySpec, length: int) -> np.ndarray:
    rng = np.random.default_rng(length)
    return (rng.integers(1, 250, (length, *spec.width))).astype(spec.dtype)


def _write(folder: Path, spec: ArraySpec, values: np.ndarray, pieces: int = 3) -> dict[str, Any]:
    writer = ArrayWriter(folder, spec)
    for piece in np.array_split(values, pieces):
        writer.append(piece)
    return writer.close()


def _tensorstore(folder: Path, **more: Any) -> Any:
    return tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}, **more}, open=True
    ).result()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_others_read_ours(tmp_path: Path, spec: ArraySpec, length: int) -> None:
    values = _values(spec, length)
    _write(tmp_path / "a", spec, values)
    for read in (zarr.open_array(tmp_path / "a", mode="r")[:], _tensorstore(tmp_path / "a").read().result()):
        assert read.dtype == values.dtype
        assert np.array_equal(read, values)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("program", ["zarr", "zarr_index_at_start", "tensorstore"])
def test_we_read_others(tmp_path: Path, spec: ArraySpec, length: int, program: str) -> None:
    values = _values(spec, length)
    metadata = spec.metadata(length)
    if program == "zarr_index_at_start":
        metadata["codecs"][0]["configuration"]["index_location"] = "start"
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "zarr.json").write_text(json.dumps(metadata))
    if program == "tensorstore":
        # In two writes, the later half first: the second one rewrites the shard.
        store = _tensorstore(folder)
        store[length // 2 :].write(values[length // 2 :]).result()
        store[: length // 2].write(values[: length // 2]).result()
    else:
        zarr.open_array(folder, mode="r+")[:] = values
    array = ArrayReader(folder)
    assert array.length == length
    rng = np.random.default_rng(0)
    for _ in range(20):
        start, stop = sorted(rng.integers(0, length + 1, 2))
        read = array.read(start, stop)
        assert read.dtype == values.dtype
        assert np.array_equal(read, values[start:stop])
    for chunk in range(array.chunks):
        array.check_chunk(chunk)


def test_writing_is_reproducible_whatever_the_pieces(tmp_path: Path) -> None:
    spec, values = SPECS[0], _values(SPECS[0], 100)
    first = _write(tmp_path / "a", spec, values, 1)
    assert _write(tmp_path / "b", spec, values, 13) == first
    assert (tmp_path / "a" / "c.0.0").read_bytes() == (tmp_path / "b" / "c.0.0").read_bytes()


def test_absent_chunk_is_an_error_not_zeros(tmp_path: Path) -> None:
    spec = SPECS[2]
    (tmp_path / "zarr.json").write_text(json.dumps(spec.metadata(64)))
    store = _tensorstore(tmp_path)
    store[:16].write(np.ones(16, "f4")).result()
    array = ArrayReader(tmp_path)
    assert np.array_equal(array.read(0, 16), np.ones(16))
    with pytest.raises(CacheError, match=r"inner chunk 1 \(elements 16 to 31\) was never written"):
        array.read(10, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zarr_format": 2}, "other codecs"),
        ({"data_type": "float64"}, "data type float64"),
        ({"shape": [100, 4]}, "do not fit"),
        ({"shape": [400, 3]}, "do not fit"),
        ({"codecs": [{"name": "bytes"}]}, "not that of a sharded array"),
        ({"chunk_key_encoding": {"name": "default"}}, "chunk keys"),
    ],
)
def test_other_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    metadata = SPECS[0].metadata(100)
    assert parse_array(metadata, "wide").spec == SPECS[0]
    with pytest.raises(ValueError, match=message):
        parse_array(metadata | change, "wide")


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float32"])
def test_whole_shard_by_zarr_python(tmp_path: Path, value_dtype: str) -> None:
    cache, rows = make_cache(tmp_path / "c", [300, 1, 700, 20], 2, value_dtype=value_dtype, temperatures=(1.0, 2.0))
    table = rank_table()
    for shard in range(2):
        group = zarr.open_group(shards_folder(cache) / read_commit(cache, shard).attempt, mode="r")
        assert set(group.array_keys()) == set(cache.manifest.arrays)
        assert group.attrs["first_sample"] == 2 * shard
        offsets = group["sample_offsets"][:]
        for r, row in enumerate(rows[2 * shard : 2 * shard + 2]):
            part = slice(offsets[r], offsets[r + 1])
            assert np.array_equal(group["tokens"][part], row.tokens)
            assert np.array_equal(group["loss_mask"][part], row.loss_mask)
            assert np.array_equal(group["tail_logmass"][part], row.tail_logmass)
            assert np.array_equal(group["log_normalizer_T2"][part], row.log_normalizers[0])
            assert np.array_equal(group["tail_logmass_T2"][part], row.tail_logmass_extra[0])
            ranks = group["rank"][part]
            assert np.array_equal(ranks == 0xFFFFFFFF, row.ids < 0)
            assert np.array_equal(ranks[row.ids >= 0], table[row.ids[row.ids >= 0]])
            bounds = group["document_index"][:]
            assert np.array_equal(group["document_starts"][bounds[r] : bounds[r + 1]], row.document_offsets)
            patterns = np.cumsum(group["logprob_delta"][part], axis=1, dtype=group["logprob_delta"].dtype)
            if value_dtype == "bfloat16":
                stored, used = (patterns.astype("u4") << 16).view("f4"), row.ids >= 0
                assert np.abs(stored[used] / row.logprobs[used] - 1).max() <= 2**-8
                assert (stored[~used] == -np.inf).all()
            else:
                assert patterns.view(row.logprobs.dtype).tobytes() == row.logprobs.tobytes()


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_example_in_the_documentation_runs(tmp_path: Path, value_dtype: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.strip().splitlines()) <= 25
    cache, rows = make_cache(tmp_path / "c", [300, 1, 700, 20], 3, value_dtype=value_dtype)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/cache.md", "exec"), names)
    for row in rows:
        tokens, documents, ids, logprobs, tail = names["read_row"](str(folder_of(cache)), row.sample_id)
        if value_dtype == "bfloat16":
            wanted = from_patterns(to_patterns(row.logprobs, value_dtype), value_dtype)
        else:
            wanted = row.logprobs
        assert_rows_equal(
            row.__class__(row.sample_id, tokens, row.loss_mask, documents, ids, logprobs, tail),
            row.__class__(
                row.sample_id, row.tokens, row.loss_mask, row.document_offsets, row.ids, wanted, row.tail_logmass
            ),
        )


def test_cache_id_is_the_documented_hash(tmp_path: Path) -> None:
    """By the words of docs/cache.md, from the file alone."""
    cache, _ = make_cache(tmp_path / "c", [9], 1, tokenizer={"name": "a", "sha256": "b"}, teacher={"name": "é"})
    values = json.loads((folder_of(cache) / "cache.json").read_text())
    cache_id = values.pop("cache_id")
    del values["library_versions"], values["tokenizer"]["name"]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert xxhash.xxh3_128_hexdigest(text.encode("ascii")) == cache_id == read_commit(cache, 0).cache_id
    words = " ".join((Path(__file__).parents[2] / "docs" / "cache.md").read_text().split())
    assert "all fields of `cache.json` but itself, `library_versions` and, within `tokenizer`, `name`" in words
