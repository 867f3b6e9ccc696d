"""How much Megatron-Core's schedules hold at once: losses where they are computed, activations on every stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_kd.config import ParallelismConfig, load_model
from megatron_kd.errors import ConfigError
from megatron_kd.planning.layout import Layout
from megatron_kd.testing import run_distributed
from tests.assets import ROOT

STAGES = 2
REAL = [(1, 4), (2, 2), (2, 4), (2, 6)]
"""Chunks on a stage, and micro batches."""
SIZES = [(pp, vp, pp * groups) for pp in (2, 3, 4, 8) for vp in (1, 2, 3, 4) for groups in (1, 2, 3, 5)]


def planned(pp: int, vp: int, microbatches: int) -> Layout:
    return Layout(
        world=pp,
        gpus_per_node=pp,
        tp=1,
        pp=pp,
        cp=1,
        ep=1,
        sequence_parallel=False,
        microbatches=microbatches,
        micro_rows=1,
        row_tokens=8,
        itemsize=4,
        vp=vp,
    )


def _counted(chunks: int, microbatches: int) -> dict[str, Any]:
    """A step of a real model: the most passes, of whichever chunk, and the most losses that waited to go backward."""
    from megatron.core import parallel_state

    from megatron_kd.device import select_device
    from megatron_kd.models.build import build_chunks
    from megatron_kd.models.chunks import as_model, chunks_of
    from megatron_kd.models.parallel import init_model_parallel
    from megatron_kd.models.schedule import run_schedule
    from megatron_kd.training.distill import microbatches_in_flight

    select_device("cpu")
    parallel_state.destroy_model_parallel()
    parallelism = ParallelismConfig(
        pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks
    )
    groups = init_model_parallel(parallelism, seed=1)
    built = build_chunks(load_model("tiny_llama", ROOT), parallelism, groups, "fp32")
    waiting, most = {"pass": 0, "loss": 0}, {"pass": 0, "loss": 0}

    def count(kind: str, output: torch.Tensor) -> None:
        waiting[kind] += 1
        most[kind] = max(most[kind], waiting[kind])
        output.register_hook(lambda _: waiting.update({kind: waiting[kind] - 1}))

    def loss(output: torch.Tensor) -> Any:
        summed = output.sum()
        count("loss", summed)
        return summed, torch.ones((), dtype=torch.int), None

    def forward(module: Any, row: torch.Tensor) -> Any:
        output = module(row[None], torch.arange(8)[None], None)
        count("pass", output)
        return output, loss

    rows = torch.arange(8).expand(microbatches, 8)
    run_schedule(
        as_model(chunks_of(built)),
        groups,
        rows,
        forward,
        number=microbatches,
        seq_length=8,
        micro_batch_size=1,
        forward_only=False,
    )
    assert set(waiting.values()) == {0}
    return {**most, "said": microbatches_in_flight(chunks_of(built)[0].config)}


def _stage(rank: int, world: int) -> list[dict[str, Any]]:
    return [_counted(*case) for case in REAL]


def test_real_steps_hold_as_much_as_is_said_and_planned() -> None:
    stages = run_distributed(_stage, STAGES)
    for number, (chunks, microbatches) in enumerate(REAL):
        layout = planned(STAGES, chunks, microbatches)
        assert [stage[number]["pass"] for stage in stages] == [layout.in_flight(stage) for stage in range(STAGES)]
        assert [stage[number]["loss"] for stage in stages] == [0] * (STAGES - 1) + [1]
        assert stages[-1][number]["said"] == 1


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_last_chunk_goes_backward_after_every_forward_pass(overlapped: bool) -> None:
    """Megatron-Core's own tables, played through for layouts with more ranks than there are here."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer import TransformerConfig

    from megatron_kd.training.distill import microbatches_in_flight

    for pp, vp, microbatches in SIZES:
        table = [chunk for _, chunk in get_schedule_table(microbatches, vp, pp)]
        config: Any = TransformerConfig(
            num_layers=pp * vp,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
            pipeline_dtype=torch.float32,
        )
        config.overlap_moe_expert_parallel_comm = overlapped
        for stage in range(pp):
            group = SimpleNamespace(size=lambda pp=pp: pp, rank=lambda stage=stage: stage)
            neighbours: Any = SimpleNamespace(
                pp_group=group, virtual_pipeline_model_parallel_size=vp if vp > 1 else None
            )
            total, _, warmup, _ = get_pp_rank_microbatches(
                microbatches, vp, pp, overlap_moe_expert_parallel_comm=overlapped, p2p_communicator=neighbours
            )
            if not overlapped:
                assert min(warmup + 1, total) == planned(pp, vp, microbatches).in_flight(stage), (pp, vp, microbatches)
        # Of the last stage, where the loss is: forward through the warm-up, then by turns.
        losses = most = 0
        for step in range(warmup, warmup + total):
            done = table[: min(step + 1, total)].count(vp - 1)
            # Overlapped, the next pass begins before the one behind it has gone back.
            losses = done - table[: step - warmup].count(0)
            most = max(most, losses)
        assert most <= microbatches_in_flight(config), (pp, vp, microbatches)
        if not overlapped:
            assert most == 1


def test_larger_groups_are_refused() -> None:
    from megatron.core.transformer import TransformerConfig

    from megatron_kd.training.distill import microbatches_in_flight

    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=4,
        pipeline_dtype=torch.float32,
    )
    with pytest.raises(ConfigError, match="microbatch_group_size_per_vp_stage is 4"):
        microbatches_in_flight(config)
