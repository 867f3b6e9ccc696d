"""The set of samples on disk: packed rows of tokens, each with an id and a hash. L row length, V vocabulary.

A folder with ``samples.json`` (what it is and what it was made from), ``tokens.npy`` int32 [n, L], ``loss_mask.npy``
uint8 [n, L], ``document_offsets.npy`` int32 (of all rows, one behind the other) and ``row_offsets.npy`` int64 [n + 1]
(where each row's document offsets begin). Sample ids count rows through all splits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from megatron_kd.cache.identity import row_hash
from megatron_kd.data.documents import document_numbers
from megatron_kd.data.names import WITHIN_DOCUMENTS
from megatron_kd.data.npy_rows import NpyRows
from megatron_kd.data.packing import PackedRow
from megatron_kd.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "samples.json"
_ROWS_PER_COUNT = 4096


@dataclass(frozen=True)
class RowBatch:
    """Rows of equal length: tokens int32 [B, L], loss_mask uint8 [B, L], document_offsets B arrays int32 [D].

    ``within_documents`` as in ``SampleSet``.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    document_offsets: list[NDArray[np.int32]]
    within_documents: bool = False

    @property
    def documents(self) -> NDArray[np.int32] | None:
        """The document of each position, int32 [B, L], of the tokens that are there; None where all see all."""
        return document_numbers(self.document_offsets, self.tokens.shape[1]) if self.within_documents else None


class SampleSet:
    """An opened set of samples; the arrays are memory-mapped, so that it costs nothing to open and to fork.

    Rows are copies, made by reads that can fail (a mapped page cannot): each raises DataError where a file is
    truncated, damaged or refused since it was opened.

    Attributes:
        path: its folder.
        manifest: the content of ``samples.json``.
        seq_length: L.
        splits: the sample ids of each split.
        packing: how documents were put into rows.
        within_documents: whether a token sees its own document alone, counted from position 0, or all before it in
            the row. Teacher and student follow it alike.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises DataError where there is no complete set of samples of this format version."""
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self.seq_length = int(self.manifest["request"]["seq_length"])
        self.splits = _split_ranges(self.manifest["splits"])
        self.packing = str(self.manifest["request"]["packing"])
        self.within_documents = self.packing in WITHIN_DOCUMENTS
        n, offsets = int(self.manifest["samples"]), int(self.manifest["document_offsets"])
        self._files = {
            "tokens": self._open("tokens", np.int32, (n, self.seq_length)),
            "loss_mask": self._open("loss_mask", np.uint8, (n, self.seq_length)),
            "document_offsets": self._open("document_offsets", np.int32, (offsets,)),
            "row_offsets": self._open("row_offsets", np.int64, (n + 1,)),
        }
        self._tokens, self._loss_mask = self._files["tokens"].mapped, self._files["loss_mask"].mapped

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokenizer_identity(self) -> dict[str, Any]:
        """The identity of the tokenizer that made the tokens, see ``Tokenizer.identity``."""
        return dict(self.manifest["tokenizer"])

    @property
    def vocab_size(self) -> int:
        """V, one more than the largest id the tokenizer has."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    def tokens(self, sample: int) -> NDArray[np.int32]:
        """The tokens of one sample: int32 [L]."""
        return self._read_row("tokens", sample)

    def loss_mask(self, sample: int) -> NDArray[np.uint8]:
        """uint8 [L], 1 where the prediction of the next token trains."""
        return self._read_row("loss_mask", sample)

    def document_offsets(self, sample: int) -> NDArray[np.int32]:
        """Where the documents of one sample begin: int32 [D], the first is 0."""
        self._checked(sample)
        start, stop = self._files["row_offsets"].read(sample, sample + 2).tolist()
        try:
            return self._files["document_offsets"].read(start, stop)
        except IndexError as error:
            raise DataError(
                f"{self.path / 'row_offsets.npy'} is damaged ({error}): restore it, or prepare again"
            ) from error

    def rows(self, ids: ArrayLike) -> RowBatch:
        """Some samples, in the order of ``ids``.

        Raises:
            DataError: an id that does not exist, or as all rows.
        """
        wanted = [self._checked(int(i)) for i in np.asarray(ids).ravel()]
        return RowBatch(
            tokens=self._read_rows("tokens", wanted),
            loss_mask=self._read_rows("loss_mask", wanted),
            document_offsets=[self.document_offsets(sample) for sample in wanted],
            within_documents=self.within_documents,
        )

    def _read_row(self, name: str, sample: int) -> NDArray[Any]:
        row: NDArray[Any] = self._files[name].read(self._checked(sample), sample + 1)[0]
        return row

    def _read_rows(self, name: str, wanted: list[int]) -> NDArray[Any]:
        file = self._files[name]
        return np.concatenate([file.read(0, 0), *(file.read(sample, sample + 1) for sample in wanted)])

    def row_hash(self, sample: int) -> bytes:
        """The 16 bytes that name a row in every cache, computed from what is on disk now."""
        return row_hash(self.tokens(sample), self.document_offsets(sample), self.within_documents)

    def token_counts(
        self, split: str | None = None, vocab_size: int | None = None, *, learned: bool = False
    ) -> NDArray[np.int64]:
        """How often each token occurs in a split (None: in all): int64 [vocab_size], by default the tokenizer's V.

        ``learned`` counts the tokens whose prediction trains: no padding and no prompts.

        A model's vocabulary may be larger than its tokenizer's, never smaller.
        """
        ids = range(len(self)) if split is None else self.split(split)
        size = self.vocab_size if vocab_size is None else vocab_size
        counts = np.zeros(size, np.int64)
        for start in range(ids.start, ids.stop, _ROWS_PER_COUNT):
            rows = slice(start, min(start + _ROWS_PER_COUNT, ids.stop))
            block = self._tokens[rows]
            if learned:
                block = block[:, 1:][self._loss_mask[rows, :-1] > 0]
            counts += np.bincount(block.ravel(), minlength=size)
        return counts

    def split(self, name: str) -> range:
        """The sample ids of one split. Raises DataError, naming those there are, for an unknown one."""
        if name not in self.splits:
            raise DataError(f"the samples {self.path} have no split {name!r}, only {', '.join(self.splits)}")
        return self.splits[name]

    def verify(self) -> None:
        """Reads every row. Raises DataError where the content is not what was written."""
        digest = xxhash.xxh3_128()
        for sample in range(len(self)):
            row = PackedRow(self.tokens(sample), self.loss_mask(sample), self.document_offsets(sample))
            add_to_digest(digest, row, self.within_documents)
        if digest.hexdigest() != self.manifest["content"]:
            raise DataError(f"the samples {self.path} are damaged (content hash differs): remove them, prepare again")

    def _checked(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise DataError(f"sample {sample} does not exist: {self.path} holds samples 0 to {len(self) - 1}")
        return sample

    def _open(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> NpyRows:
        path = self.path / f"{name}.npy"
        try:
            file = NpyRows(path)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is missing or damaged ({error}): remove {self.path} and prepare it again"
            ) from error
        array = file.mapped
        if array.shape != shape or array.dtype != dtype:
            raise DataError(
                f"{path} holds {array.dtype} {array.shape}, {MANIFEST} says {np.dtype(dtype)} {shape}: "
                f"remove {self.path} and prepare it again"
            )
        return file


def open_samples(path: str | Path) -> SampleSet:
    """Opens what ``write_samples`` wrote. Raises DataError where there is none or a part is missing."""
    return SampleSet(path)


def add_to_digest(digest: xxhash.xxh3_128, row: PackedRow, within_documents: bool) -> None:
    """Adds all of a row to the content hash of a set of samples."""
    digest.update(row_hash(row.tokens, row.document_offsets, within_documents))
    digest.update(np.ascontiguousarray(row.loss_mask))


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise DataError(f"{path} is not a set of samples (no {MANIFEST}): correct data.samples or prepare them first")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{file} has format version {version}, this program reads {FORMAT_VERSION}: prepare it again")
    return dict(manifest)


def _split_ranges(rows_of_split: Mapping[str, int]) -> dict[str, range]:
    ranges, start = {}, 0
    for name, rows in rows_of_split.items():
        ranges[name] = range(start, start + rows)
        start += rows
    return ranges
