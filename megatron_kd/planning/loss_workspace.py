"""What the loss holds beside hidden states and head. Bytes on a rank of the last stage.

N tokens of a micro batch, n of them on this rank under sequence parallelism, D hidden, Vl rows of the head on this
rank, c rows in a chunk, K cached ids. Each figure is what the implementation in ``losses/`` allocates; counted again in
``tests/unit/test_planning_loss.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import Recipe
from megatron_kd.losses.sizes import (
    BLOCK_BYTES,
    DEFAULT_CHUNK_BYTES,
    LONG_CONTEXT_ROWS,
    chunk_rows,
    logit_bytes,
    single_pass_fits,
    tile_shape,
)
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.planning.layout import Layout

FLOAT = 4  # bytes: all arithmetic on logits is float32

# Of dense, bytes for one logit at the peak, by what is alive then.
DENSE_TOP_K = 25
"""y, z, the exponentials of z, z outside the ids, its difference to the maximum and its exponentials; a mask."""
DENSE_FULL = 54
"""y, z and u; log p, p and log q; the exponentials of z twice, the terms and what they are made of; three masks."""
# On a CPU 16-bit heads are widened by panels (losses/projection.py).
_CPU_PANEL = 4 << 20


@dataclass(frozen=True)
class LossShape:
    """The sizes that decide.

    Attributes:
        tokens, local_tokens: N and n.
        vocab: true vocabulary; ``shard`` rows of it on the fullest rank, ``rows`` with padding.
        teacher_hidden: Dt of an online teacher with its whole distribution; None for top-K targets.
        itemsize: bytes of hidden states and head.
    """

    tokens: int
    local_tokens: int
    hidden: int
    vocab: int
    tp: int
    sequence_parallel: bool
    top_k: int
    teacher_hidden: int | None
    itemsize: int
    on_cpu: bool

    @property
    def shard(self) -> int:
        """⌈V/TP⌉, by which all ranks cut alike."""
        return -(-self.vocab // self.tp)

    @property
    def rows(self) -> int:
        """Rows of the head on a rank, padding included."""
        return padded_vocab_size(self.vocab, self.tp) // self.tp

    @property
    def computed(self) -> int:
        """Rows of the fullest rank that are vocabulary."""
        return min(self.rows, self.vocab)

    @property
    def full(self) -> bool:
        """Whether the teacher's whole distribution is the target."""
        return self.teacher_hidden is not None

    @staticmethod
    def of(recipe: Recipe, layout: Layout) -> LossShape:
        """Those of a recipe."""
        full = recipe.teacher.mode == "online" and recipe.teacher.targets == "full"
        return LossShape(
            tokens=layout.tokens,
            local_tokens=layout.slice_tokens,
            hidden=recipe.student.model.hidden_size,
            vocab=recipe.student.model.vocab_size,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            top_k=recipe.teacher.top_k,
            teacher_hidden=recipe.teacher.model.hidden_size if full else None,
            itemsize=layout.itemsize,
            on_cpu=recipe.cluster.gpu == "cpu",
        )


@dataclass(frozen=True)
class LossWorkspace:
    """Bytes beside inputs and head.

    Attributes:
        peak: the most at once, in forward or in the loss's own backward pass.
        held: what is left when the last layer of the model goes backward: dH, and dW until it is added up.
        chunk: tokens in a chunk; all of them for dense.
    """

    peak: float
    held: float
    chunk: int


def loss_workspace(shape: LossShape, implementation: str, mode: str, chunk_mib: float | None) -> LossWorkspace:
    """What one micro batch's loss takes.

    Args:
        mode: of fused, resolved: ``single_pass`` or ``recompute``.
        chunk_mib: None: the default of the device.
    """
    budget = default_budget(shape) if chunk_mib is None else int(chunk_mib * 2**20)
    if implementation == "dense":
        return _dense(shape)
    if implementation == "forward_chunked":
        return _forward_chunked(shape, budget)
    return _fused(shape, mode, budget)


def default_budget(shape: LossShape) -> int:
    """Bytes of the chunk buffers where a recipe gives none."""
    return DEFAULT_CHUNK_BYTES["cpu" if shape.on_cpu else "cuda"]


def resolved_mode(recipe: Recipe, shape: LossShape, in_flight: int = 1) -> str:
    """``loss.mode`` as ``losses.arguments.resolve_mode`` decides it for a head that trains."""
    if recipe.loss.implementation != "fused" or recipe.loss.mode != "auto":
        return recipe.loss.mode
    held = shape.shard * shape.hidden * FLOAT + shape.local_tokens * shape.hidden * shape.itemsize
    limit = None if recipe.loss.gradient_mib is None else int(recipe.loss.gradient_mib * 2**20)
    return "single_pass" if single_pass_fits(held, in_flight, limit) else "recompute"


def _gradients(shape: LossShape) -> tuple[float, float]:
    """dH and the float32 dW."""
    return shape.local_tokens * shape.hidden * shape.itemsize, shape.rows * shape.hidden * FLOAT


def _narrowed(shape: LossShape) -> float:
    """dW once more in the head's 16 bits, while it is handed over."""
    return shape.rows * shape.hidden * 2 if shape.itemsize == 2 else 0.0


def _fused(shape: LossShape, mode: str, budget: int) -> LossWorkspace:
    narrow = not shape.on_cpu and shape.itemsize == 2
    overlaps = shape.tp > 1
    per_logit = logit_bytes(teacher=shape.full, slope=False, overlaps=overlaps, itemsize=FLOAT, copies_narrow=narrow)
    width = shape.computed
    if mode == "recompute" and not shape.full and shape.tokens >= LONG_CONTEXT_ROWS:
        rows, width = tile_shape(shape.tokens, shape.shard, per_logit, budget)
    else:
        rows = chunk_rows(shape.tokens, shape.shard * per_logit, budget)
    slices = shape.tp if shape.sequence_parallel else 1
    rows = min(max(rows // slices, 1) * slices, shape.tokens)
    # A recompute's backward pass has nothing to exchange but dH, and so one buffer.
    buffers = rows * width * (1 + shape.full) * FLOAT
    copy = rows * width * 2 if narrow else 0
    forward = buffers * (1 + overlaps) + copy
    # Hidden rows as they are gathered, this chunk's and the next one's; dH of the chunk; ids and values on the K ids.
    chunk = rows * shape.hidden * (FLOAT if shape.on_cpu else shape.itemsize)
    chunk += 2 * rows * shape.hidden * shape.itemsize * (slices > 1) * (1 + shape.full)
    if not shape.full:
        chunk += rows * shape.top_k * 40
    dh, dw = _gradients(shape)
    if mode == "recompute":
        per_token = 68 * shape.tokens
        backward = buffers + copy + chunk + _cpu_panel(shape)
        peak = max(forward + chunk + _cpu_temporaries(shape, rows), dh + dw + max(backward, _narrowed(shape)))
        peak += per_token
        return LossWorkspace(peak, dh + per_token, rows)
    per_token = 28 * shape.tokens
    peak = dh + dw + max(forward + chunk + _cpu_temporaries(shape, rows), _narrowed(shape)) + per_token
    return LossWorkspace(peak, dh, rows)


def _forward_chunked(shape: LossShape, budget: int) -> LossWorkspace:
    per_logit = logit_bytes(
        teacher=shape.full,
        slope=False,
        overlaps=False,
        itemsize=FLOAT,
        copies_narrow=not shape.on_cpu and shape.itemsize == 2,
    )
    rows = chunk_rows(shape.tokens, shape.shard * per_logit, budget)
    slices = shape.tp if shape.sequence_parallel else 1
    rows = min(max(rows // slices, 1) * slices, shape.tokens)
    models = 1 + shape.full
    logits = models * shape.tokens * shape.computed * FLOAT
    copies = models * rows * shape.computed * FLOAT
    dh, dw = _gradients(shape)
    widened = _widened(shape, shape.hidden)
    forward = logits + copies + widened + _widened(shape, shape.teacher_hidden or 0) + _cpu_block(shape, rows)
    # Backward frees the logits of a chunk, and autograd adds dW of the second to that of the first into a third tensor.
    # On a GPU the gradient of a chunk's logits is rounded to the 16 bits of the products.
    narrow = rows * shape.computed * 2 if not shape.on_cpu and shape.itemsize == 2 else 0
    backward = dh + dw + copies / models + widened + narrow
    if rows < shape.tokens:
        backward = logits - 2 * copies + 3 * dw + dh * min(1.0, 2 * rows / shape.tokens) + widened + narrow
    peak = max(forward, backward) + 32 * shape.tokens
    return LossWorkspace(peak, dh, rows)


def _dense(shape: LossShape) -> LossWorkspace:
    per_logit = DENSE_FULL if shape.full else DENSE_TOP_K
    logits = shape.tokens * shape.computed * per_logit
    dh, _ = _gradients(shape)
    # Hidden rows gathered (on a CPU widened to float32, with the head) are kept for the products of the backward pass.
    rows = shape.tokens * shape.hidden * (FLOAT if shape.itemsize == 2 and shape.on_cpu else 0)
    if shape.sequence_parallel:
        rows += shape.tokens * shape.hidden * shape.itemsize
    per_token = shape.tokens * (40 * shape.top_k if not shape.full else 40)
    return LossWorkspace(logits + _widened(shape, shape.hidden) + rows + per_token, dh, shape.tokens)


def _widened(shape: LossShape, width: int) -> float:
    """A 16-bit head in float32 on a CPU: the references keep it, forward_chunked the teacher's in forward."""
    return shape.computed * width * FLOAT if shape.itemsize == 2 and shape.on_cpu else 0.0


def _cpu_panel(shape: LossShape) -> float:
    widens = shape.on_cpu and shape.itemsize == 2
    return min(_CPU_PANEL, shape.computed * shape.hidden * FLOAT) if widens else 0.0


def _cpu_block(shape: LossShape, rows: int) -> float:
    """What the passes over a pair of models need beside it: one block on a CPU."""
    if not (shape.on_cpu and shape.full):
        return 0.0
    row = shape.computed * FLOAT
    return min(max(1, BLOCK_BYTES["cpu"] // (4 * row)), rows) * row


def _cpu_temporaries(shape: LossShape, rows: int) -> float:
    """The panel while logits are made, the block afterwards."""
    return max(_cpu_panel(shape), _cpu_block(shape, rows))


def target_bytes(shape: LossShape) -> float:
    """The micro batch's targets on the device: ids int32 and log-probabilities in 16 bits, and the tail's."""
    return 0.0 if shape.full else shape.tokens * (shape.top_k * 6 + 4)
