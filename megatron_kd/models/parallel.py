"""The model-parallel groups of a run: tensor, pipeline, context, expert and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_kd.config import ParallelismConfig
from megatron_kd.data.context_slice import ContextSlice
from megatron_kd.errors import LaunchError


@dataclass(frozen=True)
class ParallelGroups:
    """Where this rank stands, and the groups it talks in.

    Attributes:
        collection: Megatron-Core's own collection, given to the model and the optimizer.
        tp_group: None when tensor parallelism is 1, so that single-rank code never touches a collective.
        pp_group: the stages of one pipeline.
        cp_group: the ranks that share each sequence; cp_rank, cp_size: the part of it that this rank holds.
        ep_rank, ep_size: the part of the experts that this rank holds; etp_rank, etp_size: of each expert's matrices.
        dp_group: the ranks among which a batch is spread, context-parallel ranks included.
        dp_rank, dp_size: which rows of a batch this rank has; context-parallel ranks have the same.
    """

    collection: ProcessGroupCollection
    tp_group: dist.ProcessGroup | None
    tp_rank: int
    tp_size: int
    pp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    cp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    sequence_parallel: bool

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head, and with it the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def context(self) -> ContextSlice:
        """The positions of every row that this rank works on."""
        return ContextSlice(self.cp_rank, self.cp_size)

    @property
    def length_multiple(self) -> int:
        """What the length of a row must be a multiple of, so that all ranks have equal parts of it."""
        chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        return math.lcm(chunks, self.cp_size * self.tp_size if self.sequence_parallel else 1)

    @property
    def is_first_tp_rank(self) -> bool:
        """Whether this rank speaks for its tensor-parallel group (values there are replicated)."""
        return self.tp_rank == 0

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for the job: the first of all groups, and rank 0 of the default group."""
        return self.is_first_tp_rank and self.is_first_stage and self.cp_rank == 0 and self.dp_rank == 0

    @property
    def writes_output(self) -> bool:
        """Whether this rank speaks for what a model says of this data-parallel rank's rows: of those that hold it."""
        return self.is_first_tp_rank and self.is_last_stage and self.cp_rank == 0


def init_model_parallel(
    parallelism: ParallelismConfig, seed: int, timeout: timedelta = timedelta(minutes=10)
) -> ParallelGroups:
    """Builds Megatron-Core's process groups over the default group and seeds all generators.

    Collective over the default process group.

    Raises:
        LaunchError: the number of ranks is not a multiple of the model-parallel size.
    """
    world = dist.get_world_size()
    tp, pp, cp = (
        parallelism.tensor_model_parallel_size,
        parallelism.pipeline_model_parallel_size,
        parallelism.context_parallel_size,
    )
    if world % (tp * pp * cp):
        raise LaunchError(
            f"{world} ranks were started, but tensor_model_parallel_size × pipeline_model_parallel_size × "
            f"context_parallel_size = {tp} × {pp} × {cp} = {tp * pp * cp} must divide them"
        )
    expert = parallelism.expert_model_parallel_size * parallelism.expert_tensor_parallel_size * pp
    if world % expert:
        raise LaunchError(
            f"{world} ranks were started, but expert_model_parallel_size × expert_tensor_parallel_size × "
            f"pipeline_model_parallel_size = {expert} must divide them"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=parallelism.expert_model_parallel_size,
            expert_tensor_parallel_size=parallelism.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        collection=ProcessGroupCollection.use_mpu_process_groups(),
        tp_group=parallel_state.get_tensor_model_parallel_group() if tp > 1 else None,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=tp,
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=pp,
        cp_group=parallel_state.get_context_parallel_group(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=cp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallelism.expert_model_parallel_size,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallelism.expert_tensor_parallel_size,
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        sequence_parallel=parallelism.sequence_parallel,
    )
