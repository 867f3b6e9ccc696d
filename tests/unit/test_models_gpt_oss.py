"""GPT-OSS on one rank: what each setting is worth, packed documents, and the activations' clamp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.config import ModelConfig, ParallelismConfig
from megatron_kd.models import families
from megatron_kd.models.build import build_model
from megatron_kd.models.families import gpt_oss
from megatron_kd.models.families.layouts import SAME, GateAndUp, InterleavedGateAndUp, Layout, Transposed
from megatron_kd.models.hf_source import open_hf_weights
from megatron_kd.models.load import load_hf_weights
from tests.models_oracles import random_hf_model, scaled_llama, tiny_gpt_oss, tiny_qwen3

LENGTH = 200
TOKENS = torch.randint(0, 1003, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-OSS in one file, and ``logits.pt``; experts whose two matrices are square, so that only the function
    can tell a transposition."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    built = random_hf_model(square(), seed=12)
    built.save_pretrained(folder)
    with torch.no_grad():
        torch.save(built(TOKENS).logits, folder / "logits.pt")
    return folder


def square(**changes: Any) -> ModelConfig:
    """As in the released models, hidden size and FFN width are equal."""
    return tiny_gpt_oss(ffn_hidden_size=48, **changes)


def logits_of(model: ModelConfig, source: Path, groups: Any, documents: torch.Tensor | None = None) -> torch.Tensor:
    """[b, s, V] of the imported model, the architecture taken at its word."""
    built = build_model(model, ParallelismConfig(), groups, "fp32", trainable=False)
    load_hf_weights(built, model, open_hf_weights(str(source)), groups)
    with torch.no_grad():
        logits: torch.Tensor = built(TOKENS % model.vocab_size, None, documents)
    return logits[..., : model.vocab_size]


def test_logits_are_hugging_faces(source: Path, groups: Any) -> None:
    torch.testing.assert_close(logits_of(square(), source, groups), torch.load(source / "logits.pt"), rtol=0, atol=2e-5)


def settings_changed(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Other fields of Megatron-Core's configuration than the family's."""

    def change(patch: pytest.MonkeyPatch) -> None:
        own = families.FAMILIES["gpt_oss"]
        patch.setitem(
            families.FAMILIES,
            "gpt_oss",
            replace(own, transformer=lambda model: {**own.transformer(model), **changes}),
        )

    return change


def layout_changed(name: str, layout: Layout) -> Callable[[pytest.MonkeyPatch], None]:
    """Another packing of one entry."""

    def change(patch: pytest.MonkeyPatch) -> None:
        own = families.FAMILIES["gpt_oss"]
        layer = tuple(replace(e, layout=layout) if e.megatron.endswith(name) else e for e in own.layer)
        assert layer != own.layer
        patch.setitem(families.FAMILIES, "gpt_oss", replace(own, layer=layer))

    return change


class _Halves(InterleavedGateAndUp):
    """Gate and up taken for two halves."""

    def to_megatron(self, tensors: Any, model: ModelConfig) -> torch.Tensor:
        rows = tensors[0].t() if tensors[0].dim() == 2 else tensors[0]
        return rows.reshape(2, -1, *rows.shape[1:])


WRONG: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None] | None]] = {
    "the window one longer": ({"window_size": 9}, None),
    "no window": ({"window_size": None, "window_attn_skip_freq": None}, None),
    "windows in the other layers": ({"window_attn_skip_freq": [0, 1, 0, 1]}, None),
    "softmax before the choice": ({}, settings_changed(moe_router_pre_softmax=True)),
    "no linear offset": ({}, settings_changed(glu_linear_offset=0.0)),
    "no clamp": ({}, settings_changed(activation_func_clamp_value=None)),
    "silu for the gate": ({}, settings_changed(activation_func=torch.nn.functional.silu)),
    "one expert more": ({"moe_router_topk": 3}, None),
    "rounded YaRN": ({"rope_scaling": {**tiny_gpt_oss().rope_scaling.model_dump(), "truncate": True}}, None),  # type: ignore[union-attr]
    "plain rotary positions": ({"rope_scaling": None}, None),
    "down not transposed": ({}, layout_changed("linear_fc2.weight", SAME)),
    "gate and up as halves": ({}, layout_changed("linear_fc1.weight", _Halves())),
    "biases of gate and up as halves": ({}, layout_changed("linear_fc1.bias", _Halves())),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_choice_shows(name: str, source: Path, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, change = WRONG[name]
    monkeypatch.setattr("megatron_kd.models.load.check_architecture", lambda model, hf: None)
    if change is not None:
        change(monkeypatch)
    error = (logits_of(square(**changes), source, groups) - torch.load(source / "logits.pt")).abs().max()
    assert error > 0.02, error


def test_without_sinks_it_is_another_function(source: Path, groups: Any) -> None:
    built = build_model(square(), ParallelismConfig(), groups, "fp32", trainable=False)
    load_hf_weights(built, square(), open_hf_weights(str(source)), groups)
    for layer in built.decoder.layers:
        layer.self_attention.core_attention.softmax_offset = None
    with torch.no_grad():
        logits = built(TOKENS, None, None)[..., :1003]
    assert (logits - torch.load(source / "logits.pt")).abs().max() > 0.02


DOCUMENTS = [7, 1, 60, 132]


@pytest.mark.parametrize("model", [tiny_gpt_oss(), scaled_llama(), tiny_qwen3()], ids=lambda model: model.name)
def test_packed_documents_equal_each_alone(model: ModelConfig, groups: Any) -> None:
    """Rotary positions need not begin anew: attention sees their differences alone."""
    built = build_model(model, ParallelismConfig(), groups, "fp32", trainable=False)
    for parameter in built.parameters():
        parameter.data.normal_(0.0, 0.15)
    tokens = TOKENS % model.vocab_size
    numbers = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))[None].expand_as(tokens)
    with torch.no_grad():
        packed = built(tokens, None, numbers)[..., : model.vocab_size]
        at = 0
        for length in DOCUMENTS:
            alone = built(tokens[:, at : at + length], None, None)[..., : model.vocab_size]
            torch.testing.assert_close(packed[:, at : at + length], alone, rtol=0, atol=5e-5)
            at += length
        mixed = built(tokens, None, None)[..., : model.vocab_size]
    assert (mixed - packed).abs().max() > 0.01


def test_the_activation_is_hugging_faces() -> None:
    """Values on both sides of the clamp, against transformers' own expert."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gate, up = 12 * torch.randn(2, 400, dtype=torch.float64)
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=4))
    theirs = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten())
    clamped = gate.clamp(max=gpt_oss.CLAMP)
    ours = gpt_oss.quick_gelu(clamped) * (up.clamp(-gpt_oss.CLAMP, gpt_oss.CLAMP) + 1.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert (gate > 7).any() and (up.abs() > 7).any()


@pytest.mark.parametrize(
    "layout", [GateAndUp(), InterleavedGateAndUp(), Transposed(), SAME], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("shape", [(6, 10), (10,)], ids=["matrix", "bias"])
def test_layouts_go_there_and_back(layout: Layout, shape: tuple[int, ...]) -> None:
    if isinstance(layout, Transposed) and len(shape) == 1:
        return
    count = 2 if isinstance(layout, GateAndUp) else 1
    tensors = [torch.randn(shape) for _ in range(count)]
    whole = layout.to_megatron(tensors, tiny_gpt_oss())
    if layout.paired:
        whole = whole.flatten(0, 1)
    back = layout.to_hf(whole, tiny_gpt_oss())
    assert len(back) == count and all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
