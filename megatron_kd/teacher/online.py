"""The teacher of an online run as the student's ranks ask it, whatever layout it has and wherever its weights lie.

b rows of a micro batch, m micro batches of a data-parallel rank, s positions of a whole row, sl of them on a rank, R
rows of the global batch, N = sl·b tokens sequence first, D hidden, Vl rows of the head on this rank, K kept tokens.

In the student's layout nothing is moved: each rank has the answers that it needs. In a layout of its own the teacher
scores the same R rows spread over its own data-parallel ranks:
- tokens and documents are gathered over the student's data-parallel ranks, 8 to 12 bytes a token: as the student has
  them, packing and padding included;
- a rank of the student's last stage receives 8·K + 4 bytes for each of its m·N positions with top-K targets, and D
  numbers for each of the positions that its loss is given with whole distributions (its slice under sequence
  parallelism); see ``Exchange``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.data.batches import Batch
from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.device import current_device, fail_together, get_random_state, set_random_state
from megatron_kd.models.head import read_head
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.second_layout import join_second_layout
from megatron_kd.models.transformer_config import params_dtype
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.exchange import Exchange, Share, part_of
from megatron_kd.teacher.megatron_engine import MegatronTeacher
from megatron_kd.teacher.offload import HostWeights
from megatron_kd.teacher.rows import padded

Answer = TopKTargets | tuple[Tensor, Tensor]
"""For one micro batch: targets of its N positions, or hidden states [sl, b, D] (a slice under sequence parallelism) and
head [Vl, D]."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands in a layout, as far as it decides which answers it has or needs."""

    last_stage: bool
    dp_rank: int
    dp_size: int
    context: ContextSlice
    tp_rank: int
    tp_size: int
    sequence_parallel: bool

    @classmethod
    def of(cls, groups: ParallelGroups) -> Self:
        """This rank's."""
        return cls(
            groups.is_last_stage,
            groups.dp_rank,
            groups.dp_size,
            groups.context,
            groups.tp_rank,
            groups.tp_size,
            groups.sequence_parallel,
        )

    def share(self, rows: int, length: int, *, hidden: bool) -> Share:
        """Its part of the answers for ``rows`` rows of ``length`` positions, spread evenly over the last stages."""
        runs = self.context.ranges(length)
        if hidden and self.sequence_parallel:
            part = length // self.context.size // self.tp_size
            runs = part_of(runs, self.tp_rank * part, (self.tp_rank + 1) * part)
        return Share(self.rows(rows) if self.last_stage else range(0), runs)

    def rows(self, rows: int) -> range:
        """Its rows; the last data-parallel ranks may have fewer or none."""
        portion = -(-rows // self.dp_size)
        return range(min(self.dp_rank * portion, rows), min((self.dp_rank + 1) * portion, rows))


class OnlineTeacher:
    """Answers for the micro batches of a step. All ranks make one and ask it together, as often and for as many.

    Attributes:
        engine: the model, in its own layout.
        at_once: the micro batches of a step are to be asked about together, before the student begins.
    """

    def __init__(self, recipe: Recipe, groups: ParallelGroups) -> None:
        """Builds and loads the model. Collective over all ranks.

        With whole distributions and a layout of its own, each rank of the student's last stage reads the teacher's
        head in the student's split, Vl·D numbers, and keeps it; the teacher then holds none of its own.

        Raises:
            ConfigError, CheckpointError: as ``MegatronTeacher``.
            KDError: the host's memory cannot be pinned for ``teacher.offload``.
        """
        teacher = recipe.teacher
        self._groups, self._full, self._temperature = groups, teacher.targets == "full", teacher.temperatures[0]
        own = teacher.parallelism if teacher.parallelism != recipe.parallelism.whole_stages else None
        timeout = timedelta(minutes=recipe.training.distributed_timeout_minutes)
        self._second = None if own is None else join_second_layout(own, timeout)
        random_state = get_random_state()  # ranks of one shard of the student must start from one state
        with self._layout():
            engine = MegatronTeacher(recipe.in_teacher_layout(), self._teacher_groups)
        if self._second is not None:
            set_random_state(random_state)
        self.engine = engine
        self._head: Tensor | None = None
        if self._second is not None and self._full:
            engine.drop_head()
            with fail_together("reading the teacher's head"):
                if groups.is_last_stage and teacher.checkpoint is not None:
                    dtype = params_dtype(recipe.training.precision)
                    self._head = read_head(Path(teacher.checkpoint), teacher.model, groups, dtype)
        needed = [engine.head] if self._full and self._second is None and engine.head is not None else []
        self._host = HostWeights(engine.model, stay=needed) if teacher.offload else None
        self.at_once = groups.pp_size > 1 or self._second is not None or self._host is not None
        self._standings: list[tuple[Standing, Standing]] = [
            (Standing.of(groups), Standing.of(self._teacher_groups))
        ] * dist.get_world_size()
        if self._second is not None:
            dist.all_gather_object(self._standings, self._standings[0])
        self._exchanges: dict[tuple[int, int], tuple[list[Share], Exchange]] = {}

    @property
    def _teacher_groups(self) -> ParallelGroups:
        return self._groups if self._second is None else self._second.groups

    @contextmanager
    def _layout(self) -> Iterator[None]:
        with nullcontext() if self._second is None else self._second.active():
            yield

    def answers(self, batches: Sequence[Batch]) -> list[Answer]:
        """The answers for micro batches of equal shape on the device, at the teacher's first temperature.

        Collective over the ranks of one copy of the model, and over all ranks where experts are spread over ranks or
        the teacher has its own layout: these then ask as often, for as many micro batches.

        Returns:
            One for each; nothing on the student's stages before the last.
        """
        tokens = [batch.tokens for batch in batches]
        documents = [batch.documents for batch in batches if batch.documents is not None] or None
        if self._second is None:
            return self._score(tokens, documents)
        return self._routed(batches[0], self._whole_rows(tokens), documents and self._all_documents(documents))

    def _score(self, tokens: Sequence[Tensor], documents: Sequence[Tensor] | None) -> list[Answer]:
        """The teacher's own ranks: an answer for each micro batch, nothing before the last stage."""
        with self._layout(), nullcontext() if self._host is None else self._host.on_device():
            if self._full:
                return list(self.engine.hidden_states(tokens, documents))
            return [answer.targets for answer in self.engine.top_k_of(tokens, documents)]

    def _whole_rows(self, tokens: Sequence[Tensor]) -> Tensor:
        """The global batch, int64 [R, s], in the order of the student's data-parallel ranks and their micro batches."""
        if self._groups.dp_group.size() == 1:
            return torch.cat(list(tokens))
        parts = self._gathered(torch.cat(list(tokens)))
        rows, length = len(parts[0]), parts[0].shape[1] * self._groups.cp_size
        whole = parts[0].new_empty(self._groups.dp_size * rows, length)
        for (student, _), part in zip(self._of_group(), parts, strict=True):
            own = slice(student.dp_rank * rows, (student.dp_rank + 1) * rows)
            whole[own, student.context.positions(length, part.device)] = part
        return whole

    def _all_documents(self, documents: Sequence[Tensor]) -> Tensor:
        """The documents of the global batch, int32 [R, s]; context-parallel ranks have whole rows of them already."""
        parts = self._gathered(torch.cat(list(documents)))
        of_rank = {student.dp_rank: part for (student, _), part in zip(self._of_group(), parts, strict=True)}
        return torch.cat([of_rank[rank] for rank in range(self._groups.dp_size)])

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self._groups.dp_group.size())]
        dist.all_gather(parts, mine.contiguous(), group=self._groups.dp_group)
        return parts

    def _of_group(self) -> list[tuple[Standing, Standing]]:
        """Where the members of the student's data-parallel group stand, in its order."""
        return [self._standings[rank] for rank in dist.get_process_group_ranks(self._groups.dp_group)]

    def _routed(self, like: Batch, whole: Tensor, documents: Tensor | None) -> list[Answer]:
        """This rank's rows through the teacher, and its answers to whom they belong. Collective over all ranks.

        Args:
            like: one micro batch of this rank.
            whole: int64 [R, s].
            documents: int32 [R, s].
        """
        total, length = whole.shape
        size, groups = len(like.sample_ids), self._teacher_groups
        standing = Standing.of(groups)
        rows, portion = standing.rows(total), -(-total // standing.dp_size)
        # As many passes on every rank: ranks may share experts. What is filled up scores token 0 and is dropped.
        filled = portion + -portion % size
        mine = padded(whole[rows.start : rows.stop], filled)[:, groups.context.positions(length, whole.device)]
        within = None if documents is None else padded(documents[rows.start : rows.stop], filled).split(size)
        answers = self._score(mine.split(size), within)
        have, exchange = self._exchange(total, length)
        width = self.engine.hidden_size if self._full else 2 * self.engine.top_k_size + 1
        dtype = self.engine.dtype if self._full else torch.int32
        numbers = torch.empty(0, width, dtype=dtype, device=current_device())
        if answers:
            share = have[dist.get_rank()]
            numbers = _row_by_row(answers, share.width, size)[: share.size]
        arrived = exchange.move(numbers)
        if not self._groups.is_last_stage:
            return []
        per_batch = arrived.unflatten(0, (-1, self._student_share(total, length).width)).split(size)
        return [self._answer(part.transpose(0, 1).contiguous()) for part in per_batch]

    def _student_share(self, total: int, length: int) -> Share:
        return Standing.of(self._groups).share(total, length, hidden=self._full)

    def _exchange(self, total: int, length: int) -> tuple[list[Share], Exchange]:
        """What every rank has, and this rank's side of the exchange."""
        if (total, length) not in self._exchanges:
            need, have = (
                [pair[side].share(total, length, hidden=self._full) for pair in self._standings] for side in (0, 1)
            )
            exchange = Exchange.between(have, need, dist.get_rank(), current_device())
            self._exchanges[total, length] = have, exchange
        return self._exchanges[total, length]

    def _answer(self, numbers: Tensor) -> Answer:
        """From [sl, b, W] as ``_row_by_row`` has them."""
        if self._full:
            assert self._head is not None, "the student's last stage has read it"
            return numbers, self._head
        k = self.engine.top_k_size
        ids, logprobs, tail = numbers.flatten(0, 1).split((k, k, 1), dim=1)
        logprobs, tail = (part.contiguous().view(torch.float32) for part in (logprobs, tail))
        return TopKTargets(ids.contiguous(), logprobs, tail.squeeze(1), self._temperature)


def _row_by_row(answers: Sequence[Answer], width: int, size: int) -> Tensor:
    """Micro batches of ``size`` rows as [rows·width, W]: hidden states, or ids, log-probabilities and tail as int32."""
    parts = []
    for answer in answers:
        if isinstance(answer, tuple):
            numbers = answer[0]
        else:
            values = (answer.logprobs.float(), answer.tail_logmass.float()[:, None])
            numbers = torch.cat((answer.ids, *(part.contiguous().view(torch.int32) for part in values)), dim=1)
            numbers = numbers.unflatten(0, (width, size))
        parts.append(numbers.transpose(0, 1).flatten(0, 1))
    return torch.cat(parts)
