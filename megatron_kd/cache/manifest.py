"""``cache.json``: what a cache holds and who made it. Its identity decides whether two runs share one cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from megatron_kd.cache.identity import is_hash
from megatron_kd.cache.json_text import parse_json
from megatron_kd.cache.schema import MAX_CHUNK_BYTES, WIDE_CHUNK, ArraySpec, shard_arrays
from megatron_kd.cache.values import VALUE_DTYPES
from megatron_kd.errors import CacheError

FORMAT_VERSION = 1
# Far beyond what anyone captures; they bound what a reader does for a damaged or hostile cache.json.
MAX_VOCAB_SIZE = 2**24
MAX_TOP_K = MAX_CHUNK_BYTES // (4 * WIDE_CHUNK)
MAX_SHARDS = 2**20
MAX_ROWS_PER_SHARD = 2**24
MAX_TEMPERATURES = 64
# Recorded, but a capture may go on under another version of a library.
_NOT_IDENTITY = ("library_versions",)


@dataclass(frozen=True)
class CacheManifest:
    """The content of ``cache.json``.

    Attributes:
        rows: how many rows the complete cache has; sample ids are 0 … rows − 1.
        rows_per_shard: shard i holds the samples from i·rows_per_shard on.
        top_k: K, the slots of a position.
        vocab_size: V, of the teacher's tokenizer without padding; ids are below it.
        value_dtype: of the stored log-probabilities: ``float16``, ``bfloat16`` or ``float32``.
        temperatures: the first is that of the stored log-probabilities; each further one has its log-normalizer and
            tail stored, which makes it exact as well.
        rank_table_hash: ``rank_table_hash`` of the id numbering.
        teacher: name, sha256 of the weights, architecture, engine, dtype and what else decides its answers.
        tokenizer: name, sha256, vocab_size.
        corpus: the identity of the samples.
        library_versions: of what wrote it; not part of the identity.
    """

    rows: int
    rows_per_shard: int
    top_k: int
    vocab_size: int
    rank_table_hash: str
    value_dtype: str = "float16"
    temperatures: tuple[float, ...] = (1.0,)
    teacher: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    corpus: Mapping[str, Any] = field(default_factory=dict)
    library_versions: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Raises CacheError for values no cache can have."""
        for name in ("rows", "rows_per_shard", "top_k", "vocab_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CacheError(f"{name} of a cache must be a positive integer, not {value!r}")
        if self.top_k > self.vocab_size:
            raise CacheError(f"top_k {self.top_k} is larger than the vocabulary of {self.vocab_size}")
        for name, value, most in (
            ("vocab_size", self.vocab_size, MAX_VOCAB_SIZE),
            ("top_k", self.top_k, MAX_TOP_K),
            ("rows_per_shard", self.rows_per_shard, MAX_ROWS_PER_SHARD),
        ):
            if value > most:
                raise CacheError(f"{name} of a cache is {value}, at most {most} are possible")
        if self.shards > MAX_SHARDS:
            raise CacheError(
                f"{self.rows} rows in shards of {self.rows_per_shard} make {self.shards} shards, at most {MAX_SHARDS} "
                "are possible: raise rows_per_shard"
            )
        for name in ("teacher", "tokenizer", "corpus", "library_versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise CacheError(f"{name} of a cache must be an object with names, not {getattr(self, name)!r}")
        if not isinstance(self.value_dtype, str) or self.value_dtype not in VALUE_DTYPES:
            raise CacheError(f"value_dtype {self.value_dtype!r} must be one of {', '.join(VALUE_DTYPES)}")
        if not all(type(value) in (int, float) and abs(value) < 2**100 for value in self.temperatures):
            raise CacheError(f"temperatures must be positive and distinct (to six digits), not {self.temperatures}")
        temperatures = tuple(float(value) for value in self.temperatures)
        names = {f"{value:g}" for value in temperatures}  # arrays are named by these six digits
        if not temperatures or len(names) != len(temperatures) or not all(0 < t < float("inf") for t in temperatures):
            raise CacheError(f"temperatures must be positive and distinct (to six digits), not {self.temperatures}")
        object.__setattr__(self, "temperatures", temperatures)

    @property
    def shards(self) -> int:
        """How many shards the complete cache has."""
        return -(-self.rows // self.rows_per_shard)

    @property
    def imported(self) -> bool:
        """Whether another system's cache was its source: no capture can write a shard of it."""
        return "matched_by" in self.teacher

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays of every shard, by name."""
        return shard_arrays(self.top_k, self.value_dtype, self.temperatures[1:])

    def shard_samples(self, shard_index: int) -> range:
        """The sample ids of a shard; the last shard may be shorter."""
        if not 0 <= shard_index < self.shards:
            raise CacheError(f"shard {shard_index} does not exist: the cache has {self.shards} shards, from 0")
        start = shard_index * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.rows))

    def identity(self) -> dict[str, Any]:
        """All fields that must be equal for two captures to write into one cache, as JSON values."""
        return _identity(self._json_values())

    @property
    def cache_id(self) -> str:
        """xxh3_128 (32 hexadecimal digits) of the identity; every commit record carries it."""
        return _identity_hash(self._json_values())

    def _json_values(self) -> dict[str, Any]:
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return json.loads(json.dumps(values, allow_nan=False, default=_plain))

    def to_json(self) -> str:
        """Indented JSON, the format version first."""
        values = self._json_values()
        ordered = {"format_version": values.pop("format_version"), "cache_id": self.cache_id, **values}
        return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> CacheManifest:
        """Raises CacheError, naming ``where``, for text that is not a manifest of this format version."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise CacheError(f"{where} is not JSON: {error}") from error
        version = values.get("format_version") if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise CacheError(f"{where} has format version {version!r}, this program reads {FORMAT_VERSION}")
        cache_id = values.pop("cache_id", None)
        names = {entry.name for entry in dataclasses.fields(cls)}
        if values.keys() != names:
            raise CacheError(f"{where} has other fields than a cache: {sorted(values.keys() ^ names)}")
        if not isinstance(values["temperatures"], list) or len(values["temperatures"]) > MAX_TEMPERATURES:
            raise CacheError(f"{where} has temperatures that are no list of at most {MAX_TEMPERATURES}")
        if not is_hash(values["rank_table_hash"]):
            raise CacheError(f"{where} has a rank_table_hash that is not 32 hexadecimal digits")
        if cache_id != _identity_hash(values):
            raise CacheError(f"{where} was changed after it was written: its cache_id does not fit its other fields")
        try:
            return cls(**{**values, "temperatures": tuple(values["temperatures"])})
        except CacheError as error:
            raise CacheError(f"{where} describes no possible cache: {error}") from error


def _identity(values: dict[str, Any]) -> dict[str, Any]:
    """What must be equal; a tokenizer's name is that of the folder it was read from, its hash says which it is."""
    identity = {name: value for name, value in values.items() if name not in _NOT_IDENTITY}
    if isinstance(identity.get("tokenizer"), dict):
        identity["tokenizer"] = {key: value for key, value in identity["tokenizer"].items() if key != "name"}
    return identity


def _identity_hash(values: dict[str, Any]) -> str:
    text = json.dumps(_identity(values), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} of a cache manifest cannot be written as JSON")


def first_differing_field(ours: Any, theirs: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field, by its dotted name, in which two JSON values differ, with both values; None if equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            below = f"{name}.{key}" if name else str(key)
            found = first_differing_field(ours.get(key), theirs.get(key), below)
            if found:
                return found
        return None
    return None if ours == theirs else (name, ours, theirs)
