"""Planned activations against what autograd keeps of real layers on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_kd.config import ModelConfig, ParallelismConfig, load_model
from megatron_kd.models.build import build_model
from megatron_kd.planning.activations import layer_activations
from megatron_kd.planning.layout import Layout
from megatron_kd.planning.recomputation import Recomputation
from tests.assets import ROOT

POSITIONS = 256
LLAMA = {"hidden_size": 256, "ffn_hidden_size": 640, "kv_channels": 64, "num_query_groups": 2}
GPT_OSS = {"hidden_size": 192, "ffn_hidden_size": 160, "kv_channels": 32, "window_size": None}


def kept_bytes(model: ModelConfig, groups: Any) -> int:
    """Of a forward pass: bytes of distinct tensors that are kept for backward, weights left out."""
    built = build_model(model, ParallelismConfig(), groups, "fp32", trainable=True)
    known = {parameter.untyped_storage()._cdata for parameter in built.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage  # held, so that its address is not given to another
        return tensor

    tokens = torch.randint(0, 100, (1, POSITIONS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built(tokens, torch.arange(POSITIONS)[None], None, output_processor=lambda *, hidden_states, **_: hidden_states)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("name", "changes"), [("tiny_llama", LLAMA), ("tiny_gpt_oss", GPT_OSS)])
def test_a_layer_keeps_what_is_planned(name: str, changes: dict[str, Any], groups: Any) -> None:
    model = load_model(name, ROOT).model_copy(update={**changes, "window_attn_skip_freq": None})
    two, four = (kept_bytes(model.model_copy(update={"num_layers": layers}), groups) for layers in (2, 4))
    layout = Layout(
        world=1,
        gpus_per_node=1,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        sequence_parallel=False,
        microbatches=1,
        micro_rows=1,
        row_tokens=POSITIONS,
        itemsize=4,
    )
    planned = layer_activations(model, layout, Recomputation()).kept
    # torch's RMSNorm keeps the normalised rows beside its input and output; Transformer Engine's does not.
    planned += 2 * POSITIONS * model.hidden_size * 4
    if name == "tiny_gpt_oss":  # the local attention with sinks is no flash attention: it keeps its probabilities
        planned += model.num_attention_heads * POSITIONS * (POSITIONS + 1) * 4 + POSITIONS**2
    assert planned == pytest.approx((four - two) / 2, rel=0.02)
