"""Every CPU workaround is still needed, and together they are enough.

A test here that fails after an upgrade of Megatron-Core is good news: remove that workaround.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.device.cpu_megatron import workaround_names
from megatron_kd.testing import run_distributed
from tests.assets import ROOT, environment
from tests.models_oracles import tiny_gpt_oss
from tests.unit.megatron_piece import EVERYTHING, OWN_STATE

NO_DEVICE = "RuntimeError: Found no NVIDIA driver", "AssertionError: Torch not compiled with CUDA enabled"
# For each workaround: the stage of the piece that fails without it, Megatron-Core's function that asks for CUDA, and
# how the message may begin.
FAILS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "current_device_is_cpu": ("optimizer", "core/distributed/param_and_grad_buffer.py:__init__", NO_DEVICE),
    "synchronize_is_nothing": ("save", "core/dist_checkpointing/strategies/filesystem_async.py:", NO_DEVICE),
    "streams_run_in_order": ("step", "core/distributed/param_and_grad_buffer.py:start_grad_sync", NO_DEVICE),
    "random_state_is_the_cpu_state": ("groups", "core/tensor_parallel/random.py:", NO_DEVICE),
    "tensors_move_to_cuda_by_staying": ("save", "core/optimizer/distrib_optimizer.py:", NO_DEVICE),
    "float_tensors_name_the_cuda_type": (
        "optimizer",
        "core/optimizer/distrib_optimizer.py:",
        ("TypeError: Wrapped parameters must be one of torch.cuda.FloatTensor",),
    ),
    "factories_build_cuda_tensors_on_cpu": ("optimizer", "core/optimizer/optimizer.py:", NO_DEVICE),
    "adam_keeps_its_step_in_the_group": ("load", "core/optimizer/distrib_optimizer.py:state_dict", ("AssertionError",)),
}


# What only several ranks meet.
OF_EXPERTS = "splits_of_an_exchange_are_lists"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each variant of the piece ended; one process imports Megatron-Core for all of them."""
    results = tmp_path_factory.mktemp("piece") / "results.json"
    # The NVML check of torch.cuda.is_available() leaves the driver alone, which no fork could use afterwards.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.megatron_piece", str(results)],
        cwd=ROOT,
        env=environment() | hidden,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, dict[str, Any]] = json.loads(Path(results).read_text())
    return loaded


def test_all_together_are_enough(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[EVERYTHING]
    assert (outcome["stage"], outcome["error"]) == ("end", "")
    figures = outcome["figures"]
    (first_loss, norm), _ = figures["before"]
    assert 4.0 < first_loss < 5.5 and norm > 0.1  # about log 100: 100 tokens and a random model
    assert figures["uninterrupted"][0] < first_loss - 0.05
    assert figures["resumed"] == figures["uninterrupted"]
    assert figures["weights_differ_by"] == 0.0


def test_each_workaround_says_how_it_is_needed() -> None:
    assert {*FAILS, OF_EXPERTS} == set(workaround_names())


def experts_rank(rank: int, world: int, without: str | None) -> str:
    """Runs experts spread over two ranks forward; what stopped it."""
    import torch

    from megatron_kd.config import ParallelismConfig
    from megatron_kd.device import cpu_megatron
    from megatron_kd.models.build import build_model
    from megatron_kd.models.parallel import init_model_parallel

    cpu_megatron.apply_cpu_workarounds(without=[] if without is None else [without])
    layout = ParallelismConfig(expert_model_parallel_size=2)
    model = build_model(tiny_gpt_oss(), layout, init_model_parallel(layout, seed=1), "fp32", trainable=False)
    tokens = torch.arange(rank, rank + 16)[None]
    try:
        logits = model(tokens, torch.arange(16)[None], None)
    except TypeError as error:
        return str(error).splitlines()[0]
    return "" if torch.isfinite(logits).all() else "not finite"


@pytest.mark.parametrize("without", [None, OF_EXPERTS])
def test_experts_exchange_tokens(without: str | None) -> None:
    needed = "all_to_all_single(): incompatible function arguments" if without else ""
    for message in run_distributed(experts_rank, 2, without):
        assert message.startswith(needed) and bool(message) == bool(needed), message


@pytest.mark.parametrize("name", FAILS)
def test_each_is_needed(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    stage, function, messages = FAILS[name]
    outcome = outcomes[name]
    assert outcome["error"], f"Megatron-Core runs without {name}: remove it"
    assert outcome["error"].startswith(messages)
    assert outcome["where"][-1].startswith(function)
    assert outcome["stage"] == stage


def test_the_stock_adam_counts_steps_wrongly_after_a_load(outcomes: dict[str, dict[str, Any]]) -> None:
    """The silent fault: two steps were made, each parameter believes in as many more as there are parameters."""
    ours, stock = outcomes[EVERYTHING + OWN_STATE], outcomes["adam_keeps_its_step_in_the_group" + OWN_STATE]
    assert ours["error"] == stock["error"] == ""
    assert set(ours["figures"]["steps"]) == {2.0}
    steps = stock["figures"]["steps"]
    assert len(steps) > 2 and set(steps) == {1.0 + len(steps)}
