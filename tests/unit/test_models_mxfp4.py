"""MXFP4 weights of GPT-OSS against transformers' own reading of them: every value, and the logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_kd.errors import CheckpointError
from megatron_kd.models.hf_source import SafetensorsFolder, open_hf_weights, weights_sha256
from megatron_kd.models.load import check_names
from megatron_kd.models.mxfp4 import MXFP4Weights, dequantize
from megatron_kd.models.parameters import places
from tests.models_oracles import one_rank_groups, random_hf_model, tiny_gpt_oss

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MODEL = tiny_gpt_oss(hidden_size=64, ffn_hidden_size=96)  # multiples of the 32 values of a block, not square
PROJECTIONS = ("gate_up_proj", "down_proj")


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of [E, in, out]: the nearest E2M1 value under a power of two that holds the block's largest."""
    rows = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = torch.log2(rows.abs().amax(-1, keepdim=True) / 6).ceil()
    nearest = (rows / 2**exponent).unsqueeze(-1).sub(E2M1).abs().argmin(-1).to(torch.uint8)
    return nearest[..., 0::2] | nearest[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-OSS as the released ones lie: bfloat16, experts in MXFP4, several files."""
    path = tmp_path_factory.mktemp("mxfp4")
    built = random_hf_model(MODEL).to(torch.bfloat16)
    built.save_pretrained(path, max_shard_size="80KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        state = load_file(path / file)
        for name in [name for name in state if name.endswith(PROJECTIONS)]:
            blocks, scales = quantized(state.pop(name).float())
            state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del index["weight_map"][name]
        index["weight_map"] |= dict.fromkeys(state, file)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((path / "config.json").read_text())
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The model that transformers makes of the folder."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    ).eval()


def test_every_byte_and_scale_is_transformers() -> None:
    """All 256 bytes under all 255 scales, among them those whose products are subnormal or beyond bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    ours = dequantize(blocks, scales)
    expected = convert_moe_packed_tensors(blocks[None], scales[None])[0]
    assert ours.shape == (512, 255)
    assert torch.equal(ours.contiguous().view(torch.int16), expected.view(torch.int16))


def test_the_earlier_value_is_in_the_low_bits() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x92  # 1.0 below, −0.5 above
    matrix = dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert matrix.shape == (32, 1) and matrix[:3, 0].tolist() == [2.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(4, 2, 16), torch.zeros(4, 2, dtype=torch.uint8), "must be torch.uint8"),
        (torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), "are not"),
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8), "are not"),
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.full((4, 2), 255, dtype=torch.uint8), "no number"),
    ],
)
def test_what_is_no_mxfp4_is_refused(blocks: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(blocks, scales)


def test_a_folder_is_read_as_transformers_reads_it(folder: Path, theirs: Any) -> None:
    weights = open_hf_weights(str(folder))
    check_names(MODEL, weights)
    state = theirs.state_dict()
    assert weights.names() == sorted(state)
    for name in weights.names():
        assert weights.dtype(name) == torch.bfloat16
        assert torch.equal(weights.read(name), state[name]), name
    assert "quantization_config" not in weights.config()
    # Per expert, as an import reads them.
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert weights.read(name, 3).shape == (64, 192) and torch.equal(weights.read(name, 3), state[name][3])
    with pytest.raises(IndexError):
        weights.read(name, 4)


def test_an_import_reads_one_expert_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_hf_weights(str(folder))
    assert isinstance(weights, MXFP4Weights)
    read: list[tuple[str, int | None]] = []
    stored = SafetensorsFolder(folder).read

    def noted(name: str, index: int | None = None) -> torch.Tensor:
        read.append((name, index))
        return stored(name, index)

    monkeypatch.setattr(weights.stored, "read", noted)
    for place in places(MODEL):
        place.whole(weights.read, MODEL)
    quantized_reads = [index for name, index in read if name.endswith(("_blocks", "_scales"))]
    assert len(quantized_reads) == MODEL.num_layers * 4 * 2 * 2 and set(quantized_reads) == {0, 1, 2, 3}


def test_logits_are_transformers(folder: Path, theirs: Any, tmp_path: Path) -> None:
    """In float32 on both sides, so that only the weights decide."""
    from megatron_kd.config import ParallelismConfig
    from megatron_kd.models.build import build_model
    from megatron_kd.models.load import load_hf_weights

    one_rank = one_rank_groups(tmp_path)
    tokens = torch.randint(0, MODEL.vocab_size, (1, 24), generator=torch.Generator().manual_seed(3))
    built = build_model(MODEL, ParallelismConfig(), one_rank, "fp32", trainable=False)
    load_hf_weights(built, MODEL, open_hf_weights(str(folder)), one_rank)
    with torch.no_grad():
        ours = built(tokens, torch.arange(24)[None], None)[..., : MODEL.vocab_size]
        expected = theirs.float()(tokens).logits
    theirs.to(torch.bfloat16)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_an_import_is_exported_as_transformers_dequantises(folder: Path, theirs: Any, tmp_path: Path) -> None:
    from megatron_kd.training.export_job import export
    from tests.assets import tiny_llama_folder
    from tests.unit.test_models_export import imported, same_bits, tensors

    shutil.copytree(folder, tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_folder() / name, tmp_path / "hf")
    export(imported(tmp_path, MODEL, tmp_path / "hf"), tmp_path / "out", max_shard_bytes=10**6, show_progress=False)
    assert same_bits(tensors(tmp_path / "out"), theirs.state_dict())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_half_a_pair_and_other_quantisations_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    index = copy / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    del whole["weight_map"]["model.layers.0.mlp.experts.down_proj_scales"]
    index.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.0.mlp.experts.down_proj_scales'"):
        open_hf_weights(str(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quantised by 'fp8'"):
        open_hf_weights(str(copy))


def test_a_damaged_scale_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    name = "model.layers.1.mlp.experts.down_proj"
    file = copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][f"{name}_scales"]
    state = load_file(file)
    state[f"{name}_scales"][2, 5, 1] = 255
    save_file(state, file, {"format": "pt"})
    weights = open_hf_weights(str(copy))
    weights.read(name, 1)
    with pytest.raises(CheckpointError, match=rf"{name}, expert 2, .* 255"):
        weights.read(name, 2)


def test_the_hash_is_of_what_is_stored(folder: Path) -> None:
    assert weights_sha256(open_hf_weights(str(folder))) == weights_sha256(SafetensorsFolder(folder))
