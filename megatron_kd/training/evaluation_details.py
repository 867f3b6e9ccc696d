"""What stands behind the means of an evaluation: where in a row the student errs, on which tokens, and how sure it is.

One more projection by the student's head, in chunks, gives its five best tokens at each position; nothing else of
the model runs again. n unmasked tokens of a micro batch, K cached tokens, F figures.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.device import current_device
from megatron_kd.losses import to_device
from megatron_kd.models.head import vocab_start
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.topk import extract_top_k
from megatron_kd.training.distill import Distillation, StepContext
from megatron_kd.training.evaluation_bins import (
    CONFIDENCE_BINS,
    ENTROPY_EDGES,
    confidence_bins,
    entropy_bins,
    position_bins,
    position_ranges,
    sums_by_bin,
    teacher_entropy,
)
from megatron_kd.training.sums import add_over_model

TOP = 5
FIGURES = ("kd", "ce", "top1_agreement", "top5_agreement", "teacher_top1_in_top5", "teacher_entropy")
"""Per token, in the tables' sums; ``ce`` over tokens that have a label."""
_IN_TABLES = ("kd", "ce", "top1_agreement", "top5_agreement")
_COUNTS = ("tokens", "labelled")


class EvaluationDetails:
    """Collects, micro batch by micro batch, what ``Distillation.run`` shows it; once for each evaluation."""

    def __init__(self, recipe: Recipe, distillation: Distillation, groups: ParallelGroups) -> None:
        self._groups = groups
        self._vocab_size = distillation.vocab_size
        self._t2 = distillation.t2
        self._temperature = recipe.loss.temperature
        self._top_k = min(recipe.teacher.top_k, distillation.vocab_size)
        self._chunk_bytes = None if recipe.loss.chunk_mib is None else int(recipe.loss.chunk_mib * 2**20)
        self._ranges = position_ranges(recipe.data.seq_length)
        columns = len(FIGURES) + len(_COUNTS)
        shapes = {
            "by_position": (len(self._ranges), columns),
            "by_entropy": (len(ENTROPY_EDGES) + 1, columns),
            "reliability": (CONFIDENCE_BINS, 3),
            "teacher_reliability": (CONFIDENCE_BINS, 3),
        }
        self._sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=current_device()) for name, shape in shapes.items()
        }

    @torch.no_grad()
    def observe(self, hidden: Tensor, weight: Tensor, context: StepContext) -> None:
        """Looks at one micro batch. Collective over its tensor-parallel group.

        Args:
            hidden: the student's [s, b, D], with sequence parallelism this rank's slice of it.
            weight: this rank's shard [Vl, D] of its head.
            context: with the output of the loss.
        """
        batch = context.batch
        assert context.output is not None, "the loss ran"
        rows = to_device(torch.nonzero(batch.token_weights != 0).flatten(), hidden.device)
        labels = to_device(batch.labels, hidden.device)[rows]
        student = self._best(hidden, weight, rows, TOP, 1.0)
        if context.teacher is not None:
            teacher = self._best(*context.teacher, rows, self._top_k, self._temperature)
        else:
            assert batch.targets is not None
            t = batch.targets
            teacher = TopKTargets(t.ids[rows], t.logprobs[rows], t.tail_logmass[rows], t.temperature)
        # Cached rows descend, but for ids that were folded away; equal ones stay in the order of the cache.
        order = torch.sort(teacher.logprobs.float(), dim=1, descending=True, stable=True)
        best = teacher.ids.gather(1, order.indices[:, :TOP])
        entropy = teacher_entropy(teacher.logprobs, teacher.tail_logmass)
        figures = self._figures(context, rows, labels, student.ids, best, entropy)
        positions = batch.positions.t().reshape(-1)[rows]
        self._add("by_position", position_bins(positions), figures)
        self._add("by_entropy", entropy_bins(entropy), figures)
        for name, ids, logprobs in (
            ("reliability", student.ids[:, 0], student.logprobs[:, 0]),
            ("teacher_reliability", best[:, 0], order.values[:, 0]),
        ):
            confidence = logprobs.double().exp().clamp(max=1.0)
            known = labels >= 0
            right = known & (ids == labels)
            columns = torch.stack([known, confidence * known, right], dim=1)
            self._add(name, confidence_bins(confidence), columns)

    def _best(self, hidden: Tensor, weight: Tensor, rows: Tensor, top_k: int, temperature: float) -> TopKTargets:
        if self._groups.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._groups.tp_group)
        return extract_top_k(
            hidden.reshape(-1, hidden.shape[-1])[rows],
            weight,
            min(top_k, self._vocab_size),
            vocab_size=self._vocab_size,
            vocab_start=vocab_start(weight, self._groups),
            temperature=temperature,
            group=self._groups.tp_group,
            chunk_bytes=self._chunk_bytes,
        ).targets

    def _figures(
        self, context: StepContext, rows: Tensor, labels: Tensor, mine: Tensor, best: Tensor, entropy: Tensor
    ) -> Tensor:
        """[n, F + 2] in the order of ``FIGURES`` and ``_COUNTS``.

        Args:
            mine: the student's best ids [n, 5]; best: the teacher's, fewer where it keeps fewer, −1 for none.
        """
        assert context.output is not None
        statistics = context.output.statistics
        kd, ce = statistics.kd_per_token, statistics.ce_per_token
        assert kd is not None and ce is not None, "an evaluation asks for both"
        shared = ((best.unsqueeze(2) == mine.unsqueeze(1)).any(dim=2) & (best >= 0)).double()
        kept = (best >= 0).sum(dim=1).clamp(min=1)
        one = torch.ones_like(entropy)
        return torch.stack(
            [
                kd[rows].double() / self._t2,
                ce[rows].double(),
                statistics.top1_agreement[rows].double(),
                shared.sum(dim=1) / kept,
                shared[:, 0],
                entropy,
                one,
                (labels >= 0).double(),
            ],
            dim=1,
        )

    def _add(self, name: str, bins: Tensor, figures: Tensor) -> None:
        self._sums[name] += sums_by_bin(bins, figures, len(self._sums[name]))

    def finish(self) -> tuple[dict[str, float], dict[str, Any]]:
        """The means, under their public names, and the tables. Collective over all ranks; the same on every one.

        Of the teacher's confidence there is nothing at temperatures other than 1: those are not its probabilities.
        """
        flat = torch.cat([part.flatten() for part in self._sums.values()])
        add_over_model(flat, self._groups)
        sizes = [part.numel() for part in self._sums.values()]
        sums = {
            name: part.view(self._sums[name].shape).cpu()
            for name, part in zip(self._sums, flat.split(sizes), strict=True)
        }
        total = dict(zip((*FIGURES, *_COUNTS), sums["by_position"].sum(dim=0).tolist(), strict=True))
        scalars = {
            f"eval/{name}": total[name] / total["tokens"]
            for name in ("top5_agreement", "teacher_top1_in_top5", "teacher_entropy")
        }
        edges = (0.0, *ENTROPY_EDGES)
        tables = {
            "by_position": _rows(self._ranges, sums["by_position"]),
            "by_entropy": _rows(list(zip(edges, (*edges[1:], None), strict=True)), sums["by_entropy"]),
        }
        at_one = self._temperature == 1.0
        for name, whose in (("reliability", ""), *([("teacher_reliability", "teacher_")] if at_one else [])):
            scalars |= {
                f"eval/{whose}accuracy": float(sums[name][:, 2].sum() / total["labelled"]),
                f"eval/{whose}ece": float((sums[name][:, 1] - sums[name][:, 2]).abs().sum() / total["labelled"]),
            }
            tables[name] = _reliability(sums[name])
        return scalars, tables


def _rows(bounds: list[Any], sums: Tensor) -> list[dict[str, Any]]:
    """A row for each bin that has tokens."""
    rows = []
    for (start, end), values in zip(bounds, sums.tolist(), strict=True):
        of = dict(zip((*FIGURES, *_COUNTS), values, strict=True))
        if of["tokens"]:
            counted = {name: of[name] / max(of["labelled" if name == "ce" else "tokens"], 1.0) for name in _IN_TABLES}
            rows.append({"from": start, "to": end, "tokens": int(of["tokens"]), **counted})
    return rows


def _reliability(sums: Tensor) -> list[dict[str, Any]]:
    return [
        {
            "from": bin_ / CONFIDENCE_BINS,
            "to": (bin_ + 1) / CONFIDENCE_BINS,
            "tokens": int(tokens),
            "confidence": confidence / tokens,
            "accuracy": right / tokens,
        }
        for bin_, (tokens, confidence, right) in enumerate(sums.tolist())
        if tokens
    ]
