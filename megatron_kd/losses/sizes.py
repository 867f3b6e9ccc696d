"""How large chunks are, by arithmetic alone: no torch, so that what is planned and what runs have one source."""

from __future__ import annotations

# A GPU wants some thousand rows a chunk (each chunk reads and writes dW once), a CPU is content with some hundred.
# 1.5 GiB in bfloat16: 2,048 rows of a vocabulary of 128,256 on one rank, 6,272 of a shard of 25,216 on eight.
DEFAULT_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1536 << 20}
# What the elementwise passes over a chunk touch at a time. On a CPU it should stay in the cache between passes, yet be
# so large that operators on a few numbers a row do not count; on a GPU it should only hide the launch of a kernel.
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_ROW_MULTIPLE = 128
# From so many rows on, ``recompute`` and ``no_grad`` cut the vocabulary as well (see ``tile_shape``).
LONG_CONTEXT_ROWS = 128 << 10


def logit_bytes(*, teacher: bool, slope: bool, overlaps: bool, itemsize: int, copies_narrow: bool) -> int:
    """Bytes of all chunk buffers for one logit.

    Args:
        teacher: a full-vocabulary teacher's logits lie beside the student's.
        slope: the slope of a soft-cap is kept.
        overlaps: an exchange runs beside the next chunk, which needs all of them twice.
        itemsize: bytes of a number of the arithmetic.
        copies_narrow: dz is rounded to 16 bits for the gradient GEMMs, as on a GPU with 16-bit inputs.
    """
    return (1 + teacher + slope) * (1 + overlaps) * itemsize + (2 if copies_narrow else 0)


def chunk_rows(rows: int, bytes_per_row: float, chunk_bytes: int) -> int:
    """Rows in a chunk: as few chunks as ``chunk_bytes`` allows, balanced so that the last is not a sliver.

    A multiple of 128 where the budget allows 128 rows or more; at least 1 whatever the budget.
    """
    most = max(1, int(chunk_bytes // max(1, bytes_per_row)))
    multiple = _ROW_MULTIPLE if most >= _ROW_MULTIPLE else 1
    most -= most % multiple
    chunks = max(1, -(-rows // most))
    balanced = max(1, -(-rows // chunks))
    return min(most, -(-balanced // multiple) * multiple)


def tile_shape(rows: int, vocab: int, bytes_per_logit: float, budget: int) -> tuple[int, int]:
    """(rows, columns) of a tile of logits within ``budget`` bytes that moves few bytes; see ``moved_rows``.

    With R·C = E logits in a tile the cost is N·D·(3·V·C/E + 2·V/C), least at C = √(2E/3). Multiples of 128.
    """
    logits = max(1, int(budget // bytes_per_logit))
    columns = int((2 * logits / 3) ** 0.5) // _ROW_MULTIPLE * _ROW_MULTIPLE
    columns = min(vocab, max(_ROW_MULTIPLE, columns))
    columns = max(1, -(-vocab // max(1, -(-vocab // max(1, columns)))))
    shapes = [(chunk_rows(rows, columns, logits), columns)]
    if 0 < vocab <= logits:
        shapes.append((chunk_rows(rows, vocab, logits), vocab))
    return min(shapes, key=lambda shape: moved_rows(rows, vocab, *shape))


def moved_rows(rows: int, vocab: int, height: int, width: int) -> float:
    """Rows of D numbers that ``recompute`` reads and writes beside the logits, in tiles of ``height`` × ``width``.

    W is read and dW read and written once per block of rows (three passes of V rows, N/R times); dH is read and
    written once per slice of the vocabulary beyond the first (two passes of N rows, V/C − 1 times).
    """
    return 3 * vocab * -(-rows // height) + 2 * rows * (-(-vocab // width) - 1)


def single_pass_fits(held: int, in_flight: int, budget: int | None) -> bool:
    """Whether ``auto`` takes a single pass.

    Args:
        held: bytes of dH and dW that one micro batch holds from forward to backward.
        in_flight: micro batches between their forward and backward pass at once.
        budget: bytes they may hold together; None: any for one, nothing for more.
    """
    return in_flight == 1 if budget is None else in_flight * held <= budget
