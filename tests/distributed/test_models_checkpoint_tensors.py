"""Single tensors of a checkpoint: bit by bit those of Hugging Face, whatever layout saved it, and no more is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_kd.config import ModelConfig
from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint_tensors import CheckpointTensors, CheckpointWeights
from megatron_kd.models.hf_config import check_architecture
from megatron_kd.models.hf_source import open_hf_weights
from megatron_kd.models.load import check_names
from megatron_kd.testing import run_distributed
from tests.distributed.test_models_parity import EP, SP, TP, imported, join
from tests.models_oracles import grouped_model, random_hf_model, tiny_gpt_oss, tiny_qwen3

MODELS = {
    "untied": grouped_model(),
    "tied": grouped_model(False),
    "qwen3": tiny_qwen3(),
    "gpt_oss": tiny_gpt_oss(),
}
LAYOUTS: dict[str, dict[str, Any]] = {"whole": {}, "halves": {TP: 2, SP: True, EP: 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model as Hugging Face keeps it, and saved whole, and with tensors and experts in halves."""
    folder = tmp_path_factory.mktemp("tensors")
    for name, model in MODELS.items():
        random_hf_model(model).save_pretrained(folder / name)
    run_distributed(save_rank, 2, folder)
    return folder


def without_hash(checkpoint: Path) -> str:
    """Its model.json without the hash of itself, as earlier versions wrote it."""
    note = json.loads((checkpoint / "model.json").read_text())
    del note["xxh3_128"]
    return json.dumps(note)


def save_rank(rank: int, world: int, folder: Path) -> None:
    from megatron_kd.models.checkpoint import save_weights

    for how, sizes in LAYOUTS.items():
        for name, model in MODELS.items():
            has_experts = model.num_moe_experts is not None
            layout, groups = join(**{key: size for key, size in sizes.items() if key != EP or has_experts})
            built = imported(model, str(folder / name), layout, groups, trainable=False)
            save_weights(built, model, folder / f"{name}_{how}", {"weights_sha256": "none"})


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_read_as_hugging_face_weights_has_their_bits(name: str, how: str, folder: Path) -> None:
    model, theirs = MODELS[name], open_hf_weights(str(folder / name))
    ours = CheckpointWeights(folder / f"{name}_{how}")
    assert ours.names() == theirs.names()
    for key in theirs.names():
        assert torch.equal(ours.read(key), theirs.read(key)), key
        first = ours.read(key, 1)
        assert torch.equal(first, theirs.read(key, 1)), key
    check_names(model, ours)
    check_architecture(model, ours.config())
    assert ours.model == model and ours.note["weights_sha256"] == "none"


def test_one_expert_is_read_without_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 layers with 4 experts each, the pieces of one: its two halves (gate and up), and nothing beside."""
    read: list[Any] = []
    original = FileSystemReader.read_data

    def noted(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        read.extend(plan.items)
        return original(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", noted)
    tensor = CheckpointWeights(folder / "gpt_oss_whole").read("model.layers.2.mlp.experts.gate_up_proj", 3)
    assert tensor.shape == (48, 80)
    assert [tuple(item.storage_index.offset or ()) for item in read] == [(2, 3, 0, 0), (2, 3, 40, 0)]


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    path = folder / "gpt_oss_halves"
    tensors, weights = CheckpointTensors(path), CheckpointWeights(path)
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert key in tensors.names() and tensors.shape(key) == (4, 4, 48, 40)
    assert tensors.read(key).shape == (4, 4, 48, 40) and tensors.read(key, 3, 3).shape == (48, 40)
    for index in ((4,), (-1,), (0, 4), (0, 0, 0, 0, 0)):
        with pytest.raises(IndexError, match="has no index"):
            tensors.read(key, *index)
    with pytest.raises(CheckpointError, match=r"has no tensor 'decoder\.nothing'"):
        tensors.read("decoder.nothing")
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.4.mlp.router.bias'"):
        weights.read("model.layers.4.mlp.router.bias")
    with pytest.raises(IndexError):
        weights.read("model.layers.0.mlp.experts.down_proj", 4)
    shutil.copytree(path, tmp_path / "zeros")
    for file in (tmp_path / "zeros").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"is damaged: decoder\.final_layernorm\.weight cannot"):
        CheckpointWeights(tmp_path / "zeros").read("model.norm.weight")
    note = without_hash(path)
    shutil.copytree(path, tmp_path / "unknown")
    (tmp_path / "unknown" / "model.json").write_text(note.replace('"gpt_oss"', '"mamba"'))
    with pytest.raises(CheckpointError, match="an architecture that this version cannot read"):
        CheckpointWeights(tmp_path / "unknown")


def test_a_checkpoint_of_another_architecture_than_its_note_says_is_refused(folder: Path, tmp_path: Path) -> None:
    note = without_hash(folder / "untied_whole")
    shutil.copytree(folder / "untied_whole", tmp_path / "deeper")
    (tmp_path / "deeper" / "model.json").write_text(note.replace('"num_layers": 3', '"num_layers": 4'))
    deeper = CheckpointWeights(tmp_path / "deeper")
    with pytest.raises(CheckpointError, match="is damaged or of another model"):
        deeper.read("model.layers.3.mlp.up_proj.weight")
    shutil.copytree(folder / "untied_whole", tmp_path / "grouped")
    changed = ModelConfig.model_validate(MODELS["untied"].model_dump() | {"num_query_groups": 8})
    assert changed.num_query_groups == 8
    (tmp_path / "grouped" / "model.json").write_text(note.replace('"num_query_groups": 4', '"num_query_groups": 8'))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        CheckpointWeights(tmp_path / "grouped").read("model.layers.0.self_attn.q_proj.weight")
