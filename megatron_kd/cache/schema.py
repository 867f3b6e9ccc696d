"""The arrays of a shard and their zarr v3 metadata.

Every array is one zarr shard (codec ``sharding_indexed``, index at the end with crc32c) of inner chunks compressed by
blosc (zstd level 2, bitshuffle) and closed by a crc32c. Only codecs of the zarr specification, so any zarr tool reads
them. Legend: N tokens of the shard, R rows, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megatron_kd.cache.values import pattern_dtype

# A slice decodes at most one chunk too many at each end; chunk length hardly changes the size (128 to 8192: 2 %).
WIDE_CHUNK = 256  # positions of [N, K] arrays
NARROW_CHUNK = 2048  # elements of one-dimensional arrays
MAX_CHUNK_BYTES = 2**28  # decoded; K is at most 2^18, and no damaged or hostile file makes a reader take more at once
ZSTD_LEVEL = 2  # measured: level 3 saves 0.2 % and takes a third more time

_DATA_TYPES = ("uint8", "uint16", "uint32", "int32", "int64", "float32")


@dataclass(frozen=True)
class ArraySpec:
    """One array of a shard. ``inner`` is the shape of an inner chunk: (n,) or (n, K)."""

    name: str
    dtype: np.dtype
    inner: tuple[int, ...]

    @property
    def width(self) -> tuple[int, ...]:
        """The shape behind the first dimension: () or (K,)."""
        return self.inner[1:]

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of an inner chunk."""
        return prod(self.inner) * self.dtype.itemsize

    def chunks(self, length: int) -> int:
        """How many inner chunks hold ``length`` elements of the first dimension."""
        return -(-length // self.inner[0])

    def metadata(self, length: int) -> dict[str, Any]:
        """The content of zarr.json for ``length`` elements of the first dimension."""
        outer = [self.chunks(length) * self.inner[0], *self.width]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length, *self.width],
            "data_type": self.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": list(self.inner),
                        "codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {
                                "name": "blosc",
                                "configuration": {
                                    "cname": "zstd",
                                    "clevel": ZSTD_LEVEL,
                                    "shuffle": "bitshuffle",
                                    "typesize": self.dtype.itemsize,
                                    "blocksize": 0,
                                },
                            },
                            {"name": "crc32c"},
                        ],
                        "index_codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {"name": "crc32c"},
                        ],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {},
            "storage_transformers": [],
        }

    @property
    def object_name(self) -> str:
        """The file of the array's only zarr shard, relative to the array's directory."""
        return ".".join(["c", *("0" for _ in self.inner)])


def temperature_name(temperature: float) -> str:
    """The suffix of an extra temperature's arrays: 2.0 → ``T2``, 1.5 → ``T1.5``."""
    return f"T{temperature:g}"


def shard_arrays(top_k: int, value_dtype: str, extra_temperatures: tuple[float, ...]) -> dict[str, ArraySpec]:
    """The arrays of every shard of a cache, by name. [N]: per position; the offsets have R + 1 elements.

    ``sample_offsets[r]`` is the first position of row r; ``document_starts`` holds the rows' document offsets one
    after the other, those of row r from ``document_index[r]`` to ``document_index[r + 1]``.
    """
    wide = (WIDE_CHUNK, top_k)
    narrow = (NARROW_CHUNK,)
    specs = [
        ArraySpec("rank", np.dtype("<u4"), wide),
        ArraySpec("logprob_delta", pattern_dtype(value_dtype), wide),
        ArraySpec("tail_logmass", np.dtype("<f4"), narrow),
        *(
            ArraySpec(f"{kind}_{temperature_name(temperature)}", np.dtype("<f4"), narrow)
            for temperature in extra_temperatures
            for kind in ("log_normalizer", "tail_logmass")
        ),
        ArraySpec("tokens", np.dtype("<i4"), narrow),
        ArraySpec("loss_mask", np.dtype("u1"), narrow),
        ArraySpec("sample_offsets", np.dtype("<i8"), narrow),
        ArraySpec("document_index", np.dtype("<i8"), narrow),
        ArraySpec("document_starts", np.dtype("<i4"), narrow),
    ]
    return {spec.name: spec for spec in specs}


@dataclass(frozen=True)
class StoredArray:
    """What zarr.json says of an array: its spec, the length of its first dimension, and where its index stands."""

    spec: ArraySpec
    length: int
    index_entries: int
    index_at_start: bool


def parse_array(metadata: Any, name: str) -> StoredArray:
    """Reads zarr.json of an array with one zarr shard and our codec chain, written by us or by another program.

    Raises:
        ValueError: for anything else, with what was found.
    """
    try:
        shape, grid = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        data_type = metadata["data_type"]
        (codec,) = metadata["codecs"]
        configuration = codec["configuration"]
        inner = configuration["chunk_shape"]
        inner_names = [entry["name"] for entry in configuration["codecs"]]
        index_names = [entry["name"] for entry in configuration["index_codecs"]]
        location = configuration.get("index_location", "end")
        endian = configuration["codecs"][0].get("configuration", {}).get("endian", "little")
        keys = metadata["chunk_key_encoding"]
        separator = keys.get("configuration", {}).get("separator", "/")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"zarr metadata of {name} is not that of a sharded array ({error!r})") from error
    for sizes in (shape, grid, inner):
        if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**63 for size in sizes):
            raise ValueError(f"zarr metadata of {name} has the sizes {str(sizes)[:80]}, must be positive integers")
    found = (metadata.get("zarr_format"), codec["name"], inner_names, index_names, endian)
    if found != (3, "sharding_indexed", ["bytes", "blosc", "crc32c"], ["bytes", "crc32c"], "little"):
        raise ValueError(f"zarr metadata of {name} has other codecs than this cache: {found}")
    if not isinstance(data_type, str) or data_type not in _DATA_TYPES or location not in ("start", "end"):
        raise ValueError(f"zarr metadata of {name} has data type {data_type}, index location {location}")
    if (keys.get("name"), separator) != ("default", "."):
        raise ValueError(f"zarr metadata of {name} has chunk keys {keys}, must be default with separator '.'")
    one_shard = (
        len(shape) in (1, 2)
        and len(shape) == len(grid) == len(inner)
        and shape[0] <= grid[0]
        and grid[0] % inner[0] == 0
    )
    if not one_shard or not grid[1:] == inner[1:] == shape[1:]:
        raise ValueError(f"zarr metadata of {name}: shape {shape}, shard {grid} and inner chunk {inner} do not fit")
    spec = ArraySpec(name, np.dtype(data_type).newbyteorder("<"), tuple(inner))
    if spec.chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(f"zarr metadata of {name} has chunks of {spec.chunk_bytes} bytes, at most {MAX_CHUNK_BYTES}")
    return StoredArray(spec, shape[0], grid[0] // inner[0], location == "start")
