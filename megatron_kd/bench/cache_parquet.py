"""Targets in Parquet: what a general columnar format does for them, set up as well as it allows.

A row group for each row, so that one can be read alone; zstd; BYTE_STREAM_SPLIT, which puts equal bytes of
neighbouring numbers together; page checksums, without which Parquet notices no flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.bench.cache_formats import Piece, Stored, Targets
from megatron_kd.bench.peers import PeerUnavailableError
from megatron_kd.cache.row import Row

_FILE = "targets.parquet"


def check_pyarrow() -> None:
    """Raises PeerUnavailableError where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise PeerUnavailableError("pyarrow is not installed: pip install 'megatron-kd[parquet]'") from error


@dataclass(frozen=True)
class Parquet:
    """One file: ``ids`` int32 and ``logprobs`` float16 as lists of K, and the rest of a row position by position."""

    top_k: int
    name: str = "parquet"
    values_dtype: str = "float16"
    remark: str = (
        "a row group is read whole and cut for a slice; ids int32, BYTE_STREAM_SPLIT, zstd, page checksums written and "
        "verified"
    )

    def write(self, folder: Path, rows: Sequence[Row]) -> None:
        """Writes the file, one row group after the other."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {
            "ids": pa.list_(pa.int32(), self.top_k),
            "logprobs": pa.list_(pa.float16(), self.top_k),
            "tail_logmass": pa.float32(),
            "tokens": pa.int32(),
            "loss_mask": pa.uint8(),
            "document_start": pa.uint8(),
        }
        schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])
        folder.mkdir()
        with pq.ParquetWriter(
            folder / _FILE,
            schema,
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=["ids.list.element", "logprobs.list.element"],
            write_page_checksum=True,
        ) as writer:
            for row in rows:
                documents = np.zeros(len(row), "u1")
                documents[row.document_offsets] = 1
                narrow = (row.tail_logmass, row.tokens, row.loss_mask, documents)
                wide = (row.ids, row.logprobs.astype("f2", copy=False))
                arrays = [pa.FixedSizeListArray.from_arrays(values.ravel(), self.top_k) for values in wide]
                table = pa.Table.from_arrays([*arrays, *map(pa.array, narrow)], schema=schema)
                writer.write_table(table, row_group_size=len(row))

    def open(self, folder: Path) -> Stored:
        """Opens the file and reads its footer."""
        return _ParquetRows(folder / _FILE, self.top_k)

    def part_of(self, file: Path) -> str:
        """All is in one file."""
        return "file"


class _ParquetRows:
    def __init__(self, path: Path, top_k: int) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        self._top_k = top_k

    def read(self, row: int) -> Targets:
        table: Any = self._file.read_row_group(row, use_threads=False)

        def column(name: str) -> Any:
            return table.column(name).combine_chunks()

        ids, logprobs = (column(name).flatten().to_numpy().reshape(-1, self._top_k) for name in ("ids", "logprobs"))
        column("loss_mask"), column("document_start")
        return Targets(ids, logprobs, column("tail_logmass").to_numpy(), column("tokens").to_numpy())

    def read_pieces(self, row: int, pieces: Sequence[Piece]) -> list[Targets]:
        whole = self.read(row)
        return [whole.cut(start, stop) for start, stop in pieces]

    def read_in_order(self) -> Iterator[Targets]:
        return map(self.read, range(self._file.num_row_groups))
