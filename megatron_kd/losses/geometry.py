"""Which rows are computed, and how they are cut into chunks.

N tokens in all, s slices of N/s tokens (s = the ranks under sequence parallelism, else 1), n columns: the rows of a
slice that are computed. A chunk is the same columns of every slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.losses.sizes import BLOCK_BYTES, DEFAULT_CHUNK_BYTES, LONG_CONTEXT_ROWS, chunk_rows, tile_shape
from megatron_kd.losses.transfer import to_device


def default_chunk_bytes(device: torch.device) -> int:
    """The budget of the chunk buffers where none is given."""
    return DEFAULT_CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES["cuda"])


def row_blocks(rows: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of a chunk of ``rows`` rows for the elementwise passes."""
    step = max(1, BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"]) // max(1, bytes_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


@dataclass(frozen=True)
class Geometry:
    """How the computation is cut: ``step`` columns of the row plan by ``width`` rows of the vocabulary at a time.

    ``width`` is None for the whole shard, however many rows it has: ranks with uneven shards go the same way.
    """

    step: int
    width: int | None


def plan_geometry(
    plan: RowPlan, vocab: int, bytes_per_logit: float, chunk_bytes: int | None, device: torch.device, *, tiles: bool
) -> Geometry:
    """Chunks within ``chunk_bytes`` (None: the default of the device) of a shard of ``vocab`` rows.

    ``bytes_per_logit`` counts all buffers. With ``tiles``, from ``LONG_CONTEXT_ROWS`` rows on the vocabulary is cut
    as well.
    """
    budget = chunk_bytes or default_chunk_bytes(device)
    rows = plan.columns * plan.slices
    width: int | None = None
    if tiles and rows >= LONG_CONTEXT_ROWS:
        height, width = tile_shape(rows, vocab, bytes_per_logit, budget)
    else:
        height = chunk_rows(rows, vocab * bytes_per_logit, budget)
    return Geometry(max(1, height // plan.slices), width)


@dataclass(frozen=True)
class RowPlan:
    """The rows that are computed.

    Attributes:
        tokens: N, over all slices.
        slices: s.
        columns: n, how many rows of each slice are computed.
        table: int64 [s, n], their global numbers, ascending in a slice; None when all rows are computed.
    """

    tokens: int
    slices: int
    columns: int
    table: Tensor | None

    @property
    def slice_tokens(self) -> int:
        """N/s."""
        return self.tokens // self.slices

    def global_rows(self, columns: slice, device: torch.device) -> Tensor:
        """int64 [s·c]: the global rows of a chunk in the order in which an all_gather of the slices lays them."""
        if self.table is not None:
            return self.table[:, columns].reshape(-1)
        inside = torch.arange(columns.start, columns.stop, device=device)
        if self.slices == 1:
            return inside
        starts = torch.arange(self.slices, device=device) * self.slice_tokens
        return (starts[:, None] + inside).view(-1)

    def local_rows(self, columns: slice, slice_number: int) -> Tensor | slice:
        """The same rows counted within one slice: a plain slice when all rows are computed, else int64 [c]."""
        if self.table is None:
            return columns
        return self.table[slice_number, columns] - slice_number * self.slice_tokens


def plan_rows(token_weights: Tensor, slices: int, device: torch.device) -> RowPlan:
    """Leaves out the rows of weight 0 (prompts, padding) before any GEMM.

    Only where the weights lie in CPU memory: finding the rows of a CUDA tensor would stop the host until the whole
    forward pass is done. Weights on a GPU are left as they are: all rows are computed and those of weight 0 scaled
    to zero. To save their work, pass the weights from the CPU, where the batch was made.

    Under sequence parallelism every slice computes as many rows as the fullest one; a slice with fewer takes some of
    its rows of weight 0 as well, so that all ranks run the same collectives.
    """
    tokens = token_weights.numel()
    per_slice = tokens // slices
    everything = RowPlan(tokens, slices, per_slice, None)
    if token_weights.device.type != "cpu":
        return everything
    active = (token_weights.detach() != 0).view(slices, per_slice)
    columns = int(active.sum(dim=1).max()) if per_slice else 0
    if columns == per_slice:
        return everything
    first = torch.sort((~active).to(torch.uint8), dim=1, stable=True).indices[:, :columns]
    table = first.sort(dim=1).values + torch.arange(slices)[:, None] * per_slice
    return RowPlan(tokens, slices, columns, to_device(table, device))
