"""Running a row kernel over a chunk of logits, and the output of a loss from the figures of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_kd.losses.arguments import LossArguments
from megatron_kd.losses.geometry import row_blocks
from megatron_kd.losses.kernels import CE, KD, STUDENT_MASS, TAIL, TEACHER_MASS, TOP1, RowBatch, RowKernel, RowValues
from megatron_kd.losses.output import DivergenceOutput, DivergenceStatistics


def chunk_values(
    kernel: RowKernel[Any],
    arguments: LossArguments,
    logits: Tensor,
    teacher_logits: Tensor | None,
    batch: RowBatch,
    scale: Tensor | None,
) -> RowValues:
    """Figures [6, c] and saved [S, c] of a chunk [c, V]; with ``scale`` [c] the logits become scale·dL/dlogits.

    One all_gather over the tensor-parallel group. With one rank each block is finished while it is in the cache.
    """
    blocks = list(_blocks(logits))
    if arguments.tp.size == 1:
        values = []
        for block in blocks:
            work = kernel.begin(logits[block], _part(teacher_logits, block), batch[block])
            values.append(kernel.finish(work, work.packed.unsqueeze(0), _part(scale, block)))
    else:
        works = [kernel.begin(logits[block], _part(teacher_logits, block), batch[block]) for block in blocks]
        gathered = arguments.tp.stack(torch.cat([work.packed for work in works], dim=1))
        values = [
            kernel.finish(work, gathered[:, :, block], _part(scale, block))
            for work, block in zip(works, blocks, strict=True)
        ]
    return RowValues(
        torch.cat([value.figures for value in values], dim=1), torch.cat([value.saved for value in values], dim=1)
    )


def chunk_gradient(
    kernel: RowKernel[Any],
    logits: Tensor,
    teacher_logits: Tensor | None,
    batch: RowBatch,
    saved: Tensor,
    scale: Tensor,
) -> None:
    """Fresh logits [c, V] → scale·dL/dlogits in place, by saved [S, c]; no communication."""
    for block in _blocks(logits):
        kernel.gradient(logits[block], _part(teacher_logits, block), batch[block], saved[:, block], scale[block])


def _blocks(logits: Tensor) -> Iterator[slice]:
    return row_blocks(logits.shape[0], logits.shape[1] * logits.element_size(), logits.device)


def _part(tensor: Tensor | None, block: slice) -> Tensor | None:
    return None if tensor is None else tensor[block]


def per_token_loss(arguments: LossArguments, figures: Tensor) -> Tensor:
    """[n], from figures [6, n] whose divergence is already summed over the ranks."""
    loss = (figures[KD] + figures[TAIL]).mul_(arguments.kd_scale)
    return loss.add_(figures[CE], alpha=arguments.ce_weight) if arguments.mixes_ce else loss


def output(arguments: LossArguments, loss: Tensor, figures: Tensor) -> DivergenceOutput:
    """The result of a loss over N tokens from its scalar and the figures [6, N]."""
    return DivergenceOutput(
        loss=loss,
        loss_per_token=per_token_loss(arguments, figures),
        statistics=DivergenceStatistics(
            teacher_mass=figures[TEACHER_MASS],
            student_mass=figures[STUDENT_MASS],
            tail=figures[TAIL] * arguments.t2,
            top1_agreement=figures[TOP1],
            kd_per_token=(figures[KD] + figures[TAIL]).mul_(arguments.t2) if arguments.mixes_ce else None,
            ce_per_token=figures[CE] if arguments.mixes_ce else None,
        ),
    )
