"""Sources of weights that are not plain safetensors: pickles, pointers, indexes that lie, quantised folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.hf_source import SafetensorsFolder, StoredWeights, open_hf_weights
from megatron_kd.models.load import check_names, stored_dtypes
from tests.models_oracles import grouped_model, random_hf_model

MODEL = grouped_model(False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied Llama in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    random_hf_model(MODEL).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    return folder


def state_of(source: Path) -> dict[str, torch.Tensor]:
    weights = SafetensorsFolder(source)
    return {name: weights.read(name).clone() for name in weights.names()}


def as_pickles(source: Path, folder: Path, shards: int) -> Path:
    """The same weights as torch.save writes them."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    state = state_of(source)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{i % shards + 1:05}-of-{shards:05}.bin" for i, name in enumerate(sorted(state))}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def same(weights: StoredWeights, source: Path) -> bool:
    expected = SafetensorsFolder(source)
    check_names(MODEL, weights)
    return weights.names() == expected.names() and all(
        torch.equal(weights.read(name), expected.read(name))
        and torch.equal(weights.read(name, 0), expected.read(name)[0])
        and weights.dtype(name) == expected.dtype(name) == torch.bfloat16
        for name in weights.names()
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_are_read_only_where_allowed(shards: int, source: Path, tmp_path: Path) -> None:
    folder = as_pickles(source, tmp_path / "bin", shards)
    with pytest.raises(ConfigError, match=r"pytorch_model.*--allow-pickle"):
        open_hf_weights(str(folder))
    weights = open_hf_weights(str(folder), allow_pickle=True)
    assert same(weights, source) and weights.config()["model_type"] == "llama"


def test_a_single_pickle_with_its_configuration_beside_it(source: Path, tmp_path: Path) -> None:
    folder = as_pickles(source, tmp_path / "bin", 1)
    file = (folder / "pytorch_model.bin").rename(folder / "student.pt")
    with pytest.raises(ConfigError, match=r"student.pt.*--allow-pickle"):
        open_hf_weights(str(file))
    weights = open_hf_weights(str(file), allow_pickle=True)
    assert same(weights, source) and weights.config()["model_type"] == "llama"


def test_safetensors_are_taken_before_pickles(source: Path, tmp_path: Path) -> None:
    folder = as_pickles(source, tmp_path / "both", 1)
    for file in source.glob("model*"):
        shutil.copy(file, folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert same(open_hf_weights(str(folder)), source)


class _Harm:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_pickle_that_does_more_than_hold_tensors_is_not_run(source: Path, tmp_path: Path) -> None:
    folder = as_pickles(source, tmp_path / "bin", 1)
    torch.save({"model.norm.weight": _Harm(str(tmp_path / "harmed"))}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is damaged, or holds more than tensors"):
        open_hf_weights(str(folder), allow_pickle=True)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"x": torch.zeros(1)}}, "holds 'model', a dict: not a state dict"),
        ([torch.zeros(1)], "holds a list, not a state dict"),
        (b"garbage", "is damaged"),
    ],
)
def test_pickles_that_are_no_state_dict(content: Any, message: str, source: Path, tmp_path: Path) -> None:
    folder = as_pickles(source, tmp_path / "bin", 1)
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as raised:
        open_hf_weights(str(folder), allow_pickle=True)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text())
        change(content["weight_map"])
        file.write_text(json.dumps(content))

    return edit


def _pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    sorted(folder.glob("*.safetensors"))[1].write_text(text)


def _quantized(method: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))

    return edit


def _integers(folder: Path) -> None:
    from safetensors.torch import save_file

    state = state_of(folder)
    for file in folder.glob("model*"):
        file.unlink()
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.uint8)
    save_file(state, folder / "model.safetensors")


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file missing": (
        lambda p: sorted(p.glob("*.safetensors"))[1].unlink(),
        "is missing, model.safetensors.index.json",
    ),
    "a file outside": (_index(lambda files: files.update({NORM: "../hf/x.safetensors"})), "is no file of its folder"),
    "a tensor elsewhere": (_index(lambda files: files.update({NORM: min(files.values())})), "does not contain tensor"),
    "a pointer of Git LFS": (_pointer, "run git lfs pull"),
    "fp8": (_quantized({"quant_method": "fp8"}), "quantised by 'fp8'"),
    "an unknown quantisation": (_quantized("?"), "quantised by '?'"),
    "integers": (_integers, "model.norm.weight is stored in torch.uint8"),
}


@pytest.mark.parametrize("case", BAD)
def test_folders_that_cannot_be_read(case: str, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "hf")
    damage, message = BAD[case]
    damage(tmp_path / "hf")
    with pytest.raises(CheckpointError) as raised:
        stored_dtypes(MODEL, open_hf_weights(str(tmp_path / "hf")))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_dtypes_are_known_before_a_tensor_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_hf_weights(str(source))

    def refuse(name: str, index: int | None = None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(weights, "read", refuse)
    assert set(stored_dtypes(MODEL, weights).values()) == {torch.bfloat16}
