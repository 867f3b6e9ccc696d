"""DistillKit's compressed Parquet: a folder of files with the columns ``input_ids`` list<uint64> [L],
``compressed_logprobs`` and ``bytepacked_indices`` list<list<uint8>> [L − 1][bytes], and ``compression_config.yaml``.

Row i of a text belongs to token i + 1, so it is the distribution after position i; the last position has none. Texts
are found by their tokens, in whatever order the files hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import yaml

from megatron_kd.cache.importers.distillkit_codec import Compression, decode_ids, decode_logprobs, read_compression
from megatron_kd.cache.importers.source import Samples, SourceRow
from megatron_kd.errors import CacheError

CONFIG = "compression_config.yaml"
MAX_GROUP_BYTES = 16 * 2**30
"""The largest row group, decompressed; a thousand rows of 4,096 tokens at 300 bytes each take 1.3 GiB."""
_COLUMNS = ("input_ids", "compressed_logprobs", "bytepacked_indices")
_VALUE_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float32"}
_MAX_CONFIG_BYTES = 2**20

_Group = tuple[int, int]  # file, row group


class DistillKitParquet:
    """A folder that DistillKit's sampler wrote, as a ``Source``. Rows are found by their tokens."""

    engine = "distillkit"
    proven = True

    def __init__(self, folder: Path | str, samples: Samples, *, vocab_size: int) -> None:
        """Reads the settings and the tokens of every row.

        Raises:
            CacheError: pyarrow is not installed, damage, settings that cannot hold the vocabulary, or samples that no
                row has the tokens of (the first five named).
        """
        _pyarrow()
        self._folder = Path(folder)
        self._compression = _read_config(self._folder / CONFIG)
        if 2**self._compression.id_bits < vocab_size:
            raise CacheError(
                f"{self._folder / CONFIG}: d {self._compression.d} makes ids of {self._compression.id_bits} bits, too "
                f"few for a vocabulary of {vocab_size}: larger ids were cut when they were written"
            )
        self.top_k = self._compression.k
        self.value_dtype = _VALUE_DTYPES[self._compression.exact_dtype]
        self.lossy = self._compression.lossy
        self._files = sorted(path for path in self._folder.iterdir() if path.name.endswith(".parquet"))
        if not self._files:
            raise CacheError(f"{self._folder} holds no .parquet files")
        self._place, digest = self._match(samples)
        self.identity: Mapping[str, Any] = {"compression": dict(self._compression.settings), "tokens": digest}
        self._open: tuple[_Group, Any] | None = None

    def read(self, sample: int) -> SourceRow:
        """See ``Source``. The row group of a sample is kept until another one is asked for."""
        file, group, row = self._place[sample]
        if self._open is None or self._open[0] != (file, group):
            self._open = None  # one row group in memory at a time
            self._open = ((file, group), self._read_group(file, group, _COLUMNS[1:]))
        table = self._open[1]
        where = f"{self._files[file]}: row {row} of row group {group}"
        packed = [
            _bytes_of(table.column(name), row, width, where)
            for name, width in zip(
                _COLUMNS[1:], (self._compression.logprob_bytes, self._compression.id_bytes), strict=True
            )
        ]
        with np.errstate(invalid="ignore", over="ignore"):
            logprobs = decode_logprobs(packed[0], self._compression)
        return SourceRow(where, decode_ids(packed[1], self._compression), logprobs)

    def _match(self, samples: Samples) -> tuple[list[tuple[int, int, int]], str]:
        """Where the row of every sample lies; a digest of all tokens in the order of the files."""
        places: dict[bytes, tuple[int, int, int]] = {}
        state = xxhash.xxh3_128()
        found = 0
        for file, group in self._groups():
            column = _lists(self._read_group(file, group, _COLUMNS[:1]).column(0), str(self._files[file]))
            offsets, values = _parts(column, str(self._files[file]))
            if getattr(values, "dtype", np.dtype(object)).kind not in "iu":
                raise CacheError(f"{self._files[file]}: input_ids are {column.type}, lists of integers belong there")
            values = _as_tokens(values, samples.vocab_size)
            for row in range(len(column)):
                key = _token_hash(values[offsets[row] : offsets[row + 1]])
                state.update(key)
                places.setdefault(key, (file, group, row))  # equal tokens have equal targets
            found += len(column)
        keys = [_token_hash(samples.tokens(sample)) for sample in range(len(samples))]
        missing = [sample for sample, key in enumerate(keys) if key not in places]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CacheError(
                f"{self._folder} is incomplete: none of its {found} rows has the tokens of samples "
                f"{', '.join(map(str, missing[:5]))}{more} of {samples.path}, {samples.seq_length} each"
            )
        self.surplus_rows = found - len(set(keys))
        return [places[key] for key in keys], state.hexdigest()

    def _groups(self) -> Iterator[_Group]:
        """All row groups. Raises CacheError for files without the columns, or of sizes beyond ``MAX_GROUP_BYTES``."""
        for file, path in enumerate(self._files):
            with _reported(path), _pyarrow().ParquetFile(path) as parquet:
                names = parquet.schema_arrow.names
                if missing := [name for name in _COLUMNS if name not in names]:
                    raise CacheError(
                        f"{path} has no column {', '.join(missing)}, only {', '.join(names)}: it is not of the "
                        "compressed format of DistillKit"
                    )
                groups = range(parquet.metadata.num_row_groups)
                sizes = [parquet.metadata.row_group(group).total_byte_size for group in groups]
            for group in groups:
                if not 0 <= sizes[group] <= MAX_GROUP_BYTES:
                    raise CacheError(f"{path}: row group {group} shall have {sizes[group]:,} bytes, too many to read")
                yield file, group

    def _read_group(self, file: int, group: int, columns: tuple[str, ...]) -> Any:
        path = self._files[file]
        with (
            _reported(path),
            _pyarrow().ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as parquet,
        ):
            return parquet.read_row_group(group, columns=list(columns), use_threads=False).combine_chunks()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise CacheError("reading Parquet needs pyarrow: pip install 'megatron-kd[parquet]'") from error
    return pyarrow.parquet


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into a CacheError that names it."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CacheError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _read_config(path: Path) -> Compression:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CacheError(f"{path} has {path.stat().st_size} bytes, far more than settings need")
        settings = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise CacheError(
            f"{path} cannot be read ({error.strerror}): without the settings of the compression its bytes mean nothing"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CacheError(f"{path} is not YAML: {error}") from error
    return read_compression(settings, str(path))


def _token_hash(tokens: np.ndarray) -> bytes:
    return xxhash.xxh3_128(np.ascontiguousarray(tokens, "<i4")).digest()


def _as_tokens(values: np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids as int32; one that no sample can have becomes V instead of wrapping around to one that it can."""
    return np.where((values >= 0) & (values < vocab_size), values, vocab_size).astype("i4")


def _lists(column: Any, where: str) -> Any:
    """The one array of a column of lists without nulls."""
    import pyarrow

    array = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pyarrow.concat_arrays(array.chunks)
    if not (pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type)) or array.null_count:
        raise CacheError(
            f"{where}: a column is {array.type} with {array.null_count} nulls, lists without any belong there"
        )
    return array


def _parts(lists: Any, where: str) -> tuple[np.ndarray, Any]:
    """The offsets of a list array, and what they point into: an array of numbers, or the lists within."""
    values = lists.values
    if values.null_count:
        raise CacheError(f"{where}: a list holds nulls")
    return np.asarray(lists.offsets), values if hasattr(values, "offsets") else values.to_numpy(zero_copy_only=False)


def _bytes_of(column: Any, row: int, width: int, where: str) -> np.ndarray:
    """One row of a list<list<uint8>> column: uint8 [P, width]."""
    outer = _lists(column, where)
    offsets, inner = _parts(outer, where)
    if not hasattr(inner, "offsets"):
        raise CacheError(f"{where}: a column is {outer.type}, list<list<uint8>> belongs there")
    inner_offsets, flat = _parts(inner, where)
    bounds = inner_offsets[offsets[row] : offsets[row + 1] + 1]
    if getattr(flat, "dtype", None) != np.uint8 or (np.diff(bounds) != width).any():
        widths = sorted(set(np.diff(bounds).tolist()))[:3]
        raise CacheError(
            f"{where}: positions have {widths} bytes of {inner.type.value_type}, {width} by {CONFIG}: "
            "the settings are of another file"
        )
    return flat[bounds[0] : bounds[-1]].reshape(-1, width)
