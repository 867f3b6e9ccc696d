"""How many losses Megatron-Core's schedules hold at once on the stage that has the loss."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_kd.errors import ConfigError
from megatron_kd.testing import run_distributed


def _stage(rank: int, world: int) -> dict[str, Any]:
    """The forward passes that 1F1B runs before its first backward pass, and what training says of three configs."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
    from megatron.core.transformer import TransformerConfig

    from megatron_kd.device import select_device
    from megatron_kd.training.distill import microbatches_in_flight

    select_device("cpu")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    _, _, warmup, _ = get_pp_rank_microbatches(8, 1, None)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    found: dict[str, Any] = {"warmup": warmup, "plain": microbatches_in_flight(config)}
    config.overlap_moe_expert_parallel_comm = True
    found["overlapped"] = microbatches_in_flight(config)
    config.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="virtual_pipeline_model_parallel_size is 2"):
        microbatches_in_flight(config)
    return found


def test_the_last_stage_goes_backward_after_every_forward_pass() -> None:
    first, last = run_distributed(_stage, 2)
    assert first["warmup"] == 1 and last["warmup"] == 0
    # In 1F1B as many forward passes are in flight as there are in the warm-up, and the one behind them.
    assert last["plain"] == last["warmup"] + 1
    assert last["overlapped"] == 2
