"""One committed shard, open for reading: rows by their number, each checked against the commit record."""

from __future__ import annotations

from functools import partial

import numpy as np

from megatron_kd.cache.array_reader import ArrayReader
from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.identity import row_hash
from megatron_kd.cache.rank_table import IdCoding
from megatron_kd.cache.row import Row
from megatron_kd.cache.schema import temperature_name
from megatron_kd.cache.store import Cache
from megatron_kd.cache.values import delta_decode, from_patterns
from megatron_kd.errors import CacheError

BOUNDS = ("sample_offsets", "document_index", "document_starts")
"""Arrays that are kept in memory; the files of all others stay open."""


class ShardReader:
    """Holds the open arrays of a shard, and bounds and hashes of its rows. Thread- and fork-safe as ``ArrayReader``.

    Many are open at once: of the commit record only the hashes are kept, as 32 bytes a row.
    """

    def __init__(self, cache: Cache, coding: IdCoding, shard_index: int) -> None:
        """Raises CacheError for a shard that is missing, damaged at its ends, or contradicts its record."""
        record = read_commit(cache, shard_index)
        self.shard_index, self._rows, self._tokens = shard_index, record.rows, record.tokens
        self._row_hashes, self._content_hashes = (
            b"".join(map(bytes.fromhex, hashes)) for hashes in (record.row_hashes, record.content_hashes)
        )
        storage = cache.shard_storage(record.attempt)
        self.folder: str = storage.location
        self._together = storage.together
        manifest = cache.manifest
        self._value_dtype = manifest.value_dtype
        self._extra = [temperature_name(temperature) for temperature in manifest.temperatures[1:]]
        self._coding = coding
        self._first_sample = manifest.shard_samples(shard_index)[0]
        specs = manifest.arrays
        sizes = {name: record.objects[f"{name}/{spec.object_name}"]["bytes"] for name, spec in specs.items()}
        opened = storage.together(
            [partial(ArrayReader, storage.below(name), sizes[name], spec) for name, spec in specs.items()]
        )
        self.arrays: dict[str, ArrayReader] = dict(zip(specs, opened, strict=True))
        self._offsets, self._document_index, self._document_starts = storage.together(
            [partial(self._read_whole, name) for name in BOUNDS]
        )
        for name in BOUNDS:
            self.arrays.pop(name).close()  # row bounds are small and stay in memory; their files need not stay open
        self._check_lengths()

    def _read_whole(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        most = self._tokens if name == "document_starts" else self._rows + 1
        if array.length > most:
            raise CacheError(f"{array.path} has {array.length} elements, the commit record allows at most {most}")
        return array.read(0, array.length)

    def _check_lengths(self) -> None:
        rows, tokens = self._rows, self._tokens
        for name, bounds, end in (
            ("sample_offsets", self._offsets, tokens),
            ("document_index", self._document_index, len(self._document_starts)),
        ):
            if len(bounds) != rows + 1 or bounds[0] != 0 or bounds[-1] != end or (bounds[1:] <= bounds[:-1]).any():
                raise CacheError(f"{self.folder}/{name} does not rise from 0 to {end} in {rows} steps")
        for name, array in self.arrays.items():
            if array.length != tokens:
                raise CacheError(f"{self.folder}/{name} has {array.length} positions, the commit record says {tokens}")

    def length(self, row: int) -> int:
        """The number of tokens of a row."""
        return int(self._offsets[row + 1] - self._offsets[row])

    def hash(self, row: int) -> bytes:
        """The row's hash, as committed."""
        return self._row_hashes[16 * row : 16 * (row + 1)]

    def content_hash(self, row: int) -> str:
        """The hash of the row's content, as committed: 32 hexadecimal digits."""
        return self._content_hashes[16 * row : 16 * (row + 1)].hex()

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [L] and document offsets int32 [D] of a whole row, proven by the row hash."""
        tokens = self.arrays["tokens"].read(int(self._offsets[row]), int(self._offsets[row + 1]))
        documents = self._document_starts[self._document_index[row] : self._document_index[row + 1]].copy()
        if self.hash(row) not in (row_hash(tokens, documents), row_hash(tokens, documents, True)):
            raise CacheError(f"tokens in {self.folder} do not have the row hash of the commit record: damaged")
        if not len(documents) or documents[0] != 0 or documents[-1] >= len(tokens) or (np.diff(documents) <= 0).any():
            raise CacheError(f"{self.folder}/document_starts does not rise from 0 within the row: damaged")
        return tokens, documents

    def row(self, row: int, start: int, stop: int) -> Row:
        """Positions [start, stop) of a row."""
        tokens, documents = self.tokens(row)
        base = int(self._offsets[row])
        begin, end = base + start, base + stop
        names = [name for name in self.arrays if name != "tokens"]
        parts = self._together([partial(self.arrays[name].read, begin, end) for name in names])
        read = dict(zip(names, parts, strict=True))
        try:
            ids = self._coding.decode(read["rank"])
        except ValueError as error:
            raise CacheError(f"{self.arrays['rank'].path}: {error}") from error
        extra = {}
        for field, kind in (("log_normalizers", "log_normalizer"), ("tail_logmass_extra", "tail_logmass")):
            values = [read[f"{kind}_{name}"] for name in self._extra]
            extra[field] = np.stack(values) if values else np.empty((0, stop - start), "<f4")
        return Row(
            sample_id=self._first_sample + row,
            tokens=tokens[start:stop],
            loss_mask=read["loss_mask"],
            document_offsets=documents,
            ids=ids,
            logprobs=from_patterns(delta_decode(read["logprob_delta"]), self._value_dtype),
            tail_logmass=read["tail_logmass"],
            log_normalizers=extra["log_normalizers"],
            tail_logmass_extra=extra["tail_logmass_extra"],
            start=start,
            within_documents=self.hash(row) != row_hash(tokens, documents),
        )
