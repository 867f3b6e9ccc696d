"""Weights out to Hugging Face: bit by bit what came in, in a folder that transformers loads, or nothing at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_kd.config import ModelConfig, ParallelismConfig, load_recipe
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.errors import CheckpointError, ConfigError, KDError
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import load_weights
from megatron_kd.models.convert import import_model
from megatron_kd.models.export import export_weights, parse_dtype, parse_size
from megatron_kd.models.hf_source import SafetensorsFolder, open_hf_weights
from megatron_kd.training.export_job import export
from tests.models_oracles import (
    grouped_model,
    hf_folder,
    import_recipe,
    one_rank_groups,
    scaled_llama,
    tiny_gpt_oss,
    tiny_qwen3,
)

MODELS: dict[str, ModelConfig] = {
    "llama untied": grouped_model(True, vocab_size=1003),
    "llama tied": grouped_model(False, vocab_size=1003),
    "llama scaled": scaled_llama(vocab_size=1003),
    "qwen3": tiny_qwen3(vocab_size=1003),
    "gpt_oss": tiny_gpt_oss(),
}
TOKENS = torch.randint(0, 1003, (2, 24), generator=torch.Generator().manual_seed(4))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[name].dtype and torch.equal(a.view(torch.uint8), other[name].view(torch.uint8))
        for name, a in one.items()
    )


def imported(folder: Path, model: ModelConfig, source: Path, **options: Any) -> Path:
    """The checkpoint of an import, in this process."""
    recipe = load_recipe(import_recipe(folder, model, source), [])
    return import_model(recipe, "teacher", show_progress=False, **options).checkpoint


@pytest.mark.parametrize("case", MODELS)
def test_the_round_trip_gives_every_bit_back(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = MODELS[case]
    source = hf_folder(tmp_path / "hf", model)
    checkpoint = imported(tmp_path, model, source)
    report = export(checkpoint, tmp_path / "out", max_shard_bytes=60_000, show_progress=False)
    assert same_bits(tensors(tmp_path / "out"), tensors(source))
    assert report.parameters == sum(t.numel() for t in tensors(source).values()) and report.dtype == "bfloat16"
    assert report.files == len(list((tmp_path / "out").glob("model-*"))) > 1
    # Every file of several tensors is within the limit.
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes
    for file in set(index["weight_map"].values()):
        held = load_file(tmp_path / "out" / file)
        assert held.keys() == {name for name, there in index["weight_map"].items() if there == file}
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 60_000

    theirs, again = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager").eval()
        for path in (source, tmp_path / "out")
    )
    assert again.dtype == torch.bfloat16 and type(again) is type(theirs)
    ignored = {"_name_or_path", "transformers_version", "initializer_range"}
    ours, expected = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (again, theirs))
    assert ours == expected
    assert again.generation_config.to_dict() == theirs.generation_config.to_dict()
    with torch.no_grad():
        logits = again.float()(TOKENS).logits
    torch.testing.assert_close(megatron_logits(model, checkpoint, tmp_path), logits, rtol=0, atol=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The import statement binds <|end|> names."
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(source)(text).input_ids


def megatron_logits(model: ModelConfig, checkpoint: Path, folder: Path) -> torch.Tensor:
    """[2, 24, V] in float32 of a checkpoint."""
    built = build_model(model, ParallelismConfig(), one_rank_groups(folder), "fp32", trainable=False)
    load_weights(built, model, checkpoint)
    with torch.no_grad():
        logits: torch.Tensor = built(TOKENS, torch.arange(24).expand_as(TOKENS), None)
    return logits[..., : model.vocab_size]
