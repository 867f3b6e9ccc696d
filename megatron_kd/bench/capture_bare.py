"""A teacher's bare forward pass: what ``bench capture`` compares a capture with.

N tokens, D hidden, V vocabulary, Vl rows of the head on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from megatron_kd.config import Recipe
from megatron_kd.errors import ConfigError
from megatron_kd.losses import default_chunk_bytes
from megatron_kd.losses.projection import Projection
from megatron_kd.models.head import vocab_start
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.megatron_engine import MegatronTeacher
from megatron_kd.teacher.topk import COLUMNS, chunk_rows

ENGINES = ("megatron", "hf")


class BareForward:
    """Hidden states, and the logits of all positions, chunk by chunk into one buffer that is reused from call to call.

    The chunks and the float32 products are those of a capture, so that what a capture does beyond them shows. Nothing
    looks at the logits: no softmax, no top-K, no [N, V] matrix.
    """

    def __init__(
        self,
        last_hidden: Callable[[Tensor], tuple[Tensor, Tensor]],
        *,
        vocab_size: int,
        vocab_start: Callable[[Tensor], int] = lambda weight: 0,
        logit_softcap: float | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """What of a teacher is called.

        Args:
            last_hidden: from tokens int64 [b, s] to hidden states [N, D], the same on every rank of the tensor-parallel
                group, and this rank's rows [Vl, D] of the head.
            vocab_size: V; rows of the head from it on are padding.
            vocab_start: at which of all rows this rank's begin.
            logit_softcap: the c of logits c·tanh(x / c), part of a model's own forward pass; None where there is none.
            chunk_bytes: budget of the buffer; None: that of a capture on this device.
        """
        self._last_hidden, self._vocab_size, self._vocab_start = last_hidden, vocab_size, vocab_start
        self._softcap, self._chunk_bytes = logit_softcap, chunk_bytes
        self._buffer = torch.empty(0)

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states [N, D] of tokens int64 [b, s], sequence first, and the head's rows [Vl, D] here."""
        return self._last_hidden(tokens)

    def logits(self, hidden: Tensor, weight: Tensor) -> Iterator[Tensor]:
        """The logits of this rank's vocabulary, float32 [c, ≤ Vl] for each chunk; valid until the next is asked for."""
        head = weight[: max(0, min(weight.shape[0], self._vocab_size - self._vocab_start(weight)))]
        padded = math.ceil(weight.shape[0] / COLUMNS) * COLUMNS
        rows = chunk_rows(hidden.shape[0], padded, self._chunk_bytes or default_chunk_bytes(hidden.device))
        if self._buffer.shape != (rows, head.shape[0]) or self._buffer.device != hidden.device:
            self._buffer = torch.empty((rows, head.shape[0]), device=hidden.device)
        projection = Projection(head, slice(0, head.shape[0]), torch.float32)
        for chunk in hidden.detach().split(rows):
            out = self._buffer[: chunk.shape[0]]
            projection.logits(chunk, out=out)
            if self._softcap is not None:
                out.div_(self._softcap).tanh_().mul_(self._softcap)
            yield out


def check_engine(recipe: Recipe) -> None:
    """Raises ConfigError for an engine that gives no hidden states."""
    if recipe.teacher.engine not in ENGINES:
        raise ConfigError(
            f"teacher.engine {recipe.teacher.engine} tells log-probabilities only, so that there is no bare forward "
            f"pass to compare with: set teacher.engine to {' or '.join(ENGINES)}"
        )


def bare_forward(teacher: TeacherEngine, recipe: Recipe, groups: ParallelGroups) -> BareForward:
    """The bare forward pass of a teacher that ``open_teacher`` opened for the recipe.

    Raises:
        ConfigError: an engine that gives no hidden states.
    """
    check_engine(recipe)
    chunk_mib = recipe.loss.chunk_mib
    chunk_bytes = None if chunk_mib is None else int(chunk_mib * 2**20)
    vocab_size = recipe.teacher.model.vocab_size
    if isinstance(teacher, MegatronTeacher):
        return BareForward(
            lambda tokens: _megatron_hidden(teacher, groups, tokens),
            vocab_size=vocab_size,
            vocab_start=lambda weight: vocab_start(weight, groups),
            chunk_bytes=chunk_bytes,
        )
    from megatron_kd.teacher.hf_engine import HFTeacher  # transformers takes seconds to import

    assert isinstance(teacher, HFTeacher)
    head = teacher.head

    def last_hidden(tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = teacher.hidden_states(tokens).reshape(tokens.numel(), -1)
        columns = head.weight.shape[1] - hidden.shape[1]  # above 0 where the head has its bias as one more column
        if columns:
            hidden = pad(pad(hidden, (0, 1), value=1.0), (0, columns - 1))
        return hidden, head.weight

    softcap = None if head.softcap is None else head.softcap / head.scale
    return BareForward(last_hidden, vocab_size=vocab_size, logit_softcap=softcap, chunk_bytes=chunk_bytes)


def _megatron_hidden(teacher: MegatronTeacher, groups: ParallelGroups, tokens: Tensor) -> tuple[Tensor, Tensor]:
    ((hidden, weight),) = teacher.hidden_states([tokens])
    if groups.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp_group)
    return hidden.reshape(-1, hidden.shape[-1]), weight
