"""One iteration or span of Megatron-LM's tars, from the parts of its ranks to rows in the order of the samples.

Legend: S positions of a row, M rows of a micro batch, T micro batches, K' slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_kd.cache.importers.payload import MAX_MEMBER_BYTES, Member, as_array, decompressed, load_tensors
from megatron_kd.errors import CacheError

_VALUES = ("float16", "bfloat16", "float32")
_UNUSED = -1000.0


def largest_part(rows: int, positions: int, k: int) -> int:
    """The most bytes that a part of so many rows holds: 4 for a value, 2 + 1 for an id, and the records of its zip."""
    return min(MAX_MEMBER_BYTES, rows * (positions * k * 7 + 4096) + 2**20)


def zigzag(parts: list[np.ndarray]) -> np.ndarray:
    """Context-parallel parts [S/cp, …] to the sequence [S, …]: part r is the chunks r and 2·cp − 1 − r of 2·cp."""
    if len(parts) == 1:
        return parts[0]
    halves = [np.split(part, 2) for part in parts]
    return np.concatenate([half[0] for half in halves] + [half[1] for half in reversed(halves)])


def first_layout_rows(
    parts: dict[tuple[int, int], Member], cp: int, dp: int, seq_length: int, k: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """An iteration of the first layout.

    Args:
        parts: the member of every (context-parallel, data-parallel) rank.
        limit: the most bytes that one of them may decompress to.

    Returns:
        ids int32 and logprobs [T·dp·M, S, K'], row (m·dp + d)·M + b from micro batch m of rank d.

    Raises:
        CacheError: for damage, other lengths than S, more slots than k, or ranks that do not agree.
    """
    if seq_length % (2 * cp if cp > 1 else 1):
        raise CacheError(f"rows of {seq_length} positions cannot have been split among {cp} context-parallel ranks")
    loaded = {rank: _microbatches(member, seq_length // cp, k, limit) for rank, member in sorted(parts.items())}
    shapes = {tuple(values.shape[1] for _, values in batches) for batches in loaded.values()}
    if len(shapes) > 1:
        raise CacheError(f"{min(parts.items())[1].where}: the parts of its ranks have different numbers of rows")
    (rows,) = shapes
    width = max(values.shape[2] for batches in loaded.values() for _, values in batches)
    all_ids, all_values = [], []
    for m in range(len(rows)):
        for d in range(dp):
            shards = [loaded[c, d][m] for c in range(cp)]
            all_ids.append(zigzag([_widened(ids, width, 0) for ids, _ in shards]).transpose(1, 0, 2))
            all_values.append(zigzag([_widened(values, width, _UNUSED) for _, values in shards]).transpose(1, 0, 2))
    return np.concatenate(all_ids), np.concatenate(all_values)


def second_layout_rows(
    parts: dict[tuple[int, int], Member], dp: int, micro_batch: int, seq_length: int, k: int, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """A span of the second layout: ids int32 and logprobs [rows, S, K] in the order of the samples.

    Raises:
        CacheError: as ``first_layout_rows``.
    """
    loaded = [_whole(parts[0, d], seq_length, k, limit) for d in range(dp)]
    shapes = {values.shape for _, values in loaded}
    (_, rows, _), *others = sorted(shapes)
    if others or rows % micro_batch:
        raise CacheError(
            f"{parts[0, 0].where}: its ranks hold {sorted(shape[1] for shape in shapes)} rows; all must hold the same "
            f"number, a multiple of the micro batch of {micro_batch}"
        )
    ids, values = (np.stack([part[i].transpose(1, 0, 2) for part in loaded]) for i in range(2))

    def in_order(array: np.ndarray) -> np.ndarray:
        # [dp, rows, …] → [rows // M, dp, M, …] → all rows one behind the other
        blocks = array.reshape(dp, rows // micro_batch, micro_batch, *array.shape[2:])
        return blocks.swapaxes(0, 1).reshape(dp * rows, *array.shape[2:])

    return in_order(ids), in_order(values)


def _microbatches(member: Member, positions: int, k: int, limit: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The micro batches of one rank: ids int32 and values [positions, M, K']."""
    tensors = load_tensors(decompressed(member, limit), member.where)
    lists = [_entry(tensors, name, member, list) for name in ("values", "indices_low", "bit_17")]
    if not lists[0] or len({len(entry) for entry in lists}) > 1:
        raise CacheError(f"{member.where} is damaged: {[len(entry) for entry in lists]} micro batches")
    batches = []
    for values, low, high in zip(*lists, strict=True):
        values = as_array(values, _VALUES, member.where)
        low, high = as_array(low, ("uint16",), member.where), as_array(high, ("bool",), member.where)
        _check_shape(values, low, positions, k, member)
        if high.shape != low.shape:
            raise CacheError(f"{member.where} is damaged: bit_17 is {high.shape}, indices_low {low.shape}")
        batches.append((high.astype("i4") * 65536 + low, values))
    return batches


def _whole(member: Member, positions: int, k: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one rank in the second layout: ids int32 and values [positions, rows, K]."""
    tensors = load_tensors(decompressed(member, limit), member.where)
    if tensors.get("format_version") != 2:
        raise CacheError(f"{member.where} has format version {tensors.get('format_version')!r}, 2 can be read")
    values = as_array(_entry(tensors, "values", member), _VALUES, member.where)
    low = as_array(_entry(tensors, "indices_low", member), ("uint16",), member.where)
    packed = as_array(_entry(tensors, "bit_17", member), ("uint8",), member.where)
    _check_shape(values, low, positions, k, member)
    if packed.shape != (-(-low.size // 8),):
        raise CacheError(f"{member.where} is damaged: bit_17 is {packed.shape} for {low.size} ids, one bit each")
    high = np.unpackbits(packed, count=low.size).reshape(low.shape)
    return high.astype("i4") * 65536 + low, values


def _entry(tensors: dict[str, Any], name: str, member: Member, kind: type = object) -> Any:
    if name not in tensors or not isinstance(tensors[name], kind):
        raise CacheError(f"{member.where} has no {name} as this layout keeps it: it holds {sorted(map(str, tensors))}")
    return tensors[name]


def _check_shape(values: np.ndarray, low: np.ndarray, positions: int, k: int, member: Member) -> None:
    if values.ndim != 3 or values.shape != low.shape or 0 in values.shape:
        raise CacheError(f"{member.where} is damaged: values are {values.shape}, indices_low {low.shape}")
    if values.shape[0] != positions:
        raise CacheError(
            f"{member.where} holds {values.shape[0]} positions a row, the samples need {positions} of this rank"
        )
    if values.shape[2] > k:
        raise CacheError(f"{member.where} holds {values.shape[2]} slots a position, its metadata says at most {k}")


def _widened(array: np.ndarray, width: int, filling: float) -> np.ndarray:
    """[S, M, K'] to [S, M, width]."""
    return np.pad(array, ((0, 0), (0, 0), (0, width - array.shape[2])), constant_values=filling)
