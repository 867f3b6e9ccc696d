"""Weights out to Hugging Face: bit by bit what came in, in a folder that transformers loads, or nothing at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied Llama as it is published, in bfloat16."""
    return hf_folder(tmp_path_factory.mktemp("source") / "hf", MODELS["llama tied"])


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its import."""
    return imported(tmp_path_factory.mktemp("checkpoint"), MODELS["llama tied"], source)


def test_mixed_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    """Norms in float32, one layer's matrix in float16: the narrowest dtype that holds all layers, and no value lost."""
    from safetensors.torch import save_file

    model = grouped_model(vocab_size=1003, num_attention_heads=2, num_query_groups=1)
    source = hf_folder(tmp_path / "hf", model)
    state = tensors(source)
    for file in source.glob("model*"):
        file.unlink()
    odd = "model.layers.1.mlp.up_proj.weight"
    for name in state:
        state[name] = state[name].float() if "norm" in name else state[name].half() if name == odd else state[name]
    save_file(state, source / "model.safetensors", {"format": "pt"})
    checkpoint = imported(tmp_path, model, source)
    export(checkpoint, tmp_path / "out", max_shard_bytes=10**9, show_progress=False)
    back = tensors(tmp_path / "out")
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor.float(), state[name].float()), name
        # gate and up of all layers are one stacked tensor in a distributed checkpoint
        wanted = torch.float32 if "norm" in name or "gate_proj" in name or "up_proj" in name else torch.bfloat16
        assert tensor.dtype == wanted, name


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_another_dtype_where_asked_for(name: str, dtype: torch.dtype, checkpoint: Path, tmp_path: Path) -> None:
    report = export(checkpoint, tmp_path / "out", max_shard_bytes=10**9, dtype=parse_dtype(name), show_progress=False)
    stored = open_hf_weights(str(tmp_path / "out"))
    assert {stored.dtype(each) for each in stored.names()} == {dtype}
    assert (tmp_path / "out/model.safetensors").exists() and report.files == 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == report.dtype == str(dtype).removeprefix("torch.")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, 0, 7)


def test_without_a_kept_configuration_the_end_of_a_text_is_the_tokenizers(checkpoint: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(checkpoint, old)
    for name in ("config.json", "generation_config.json"):
        (old / name).unlink()
    export(old, tmp_path / "out", max_shard_bytes=10**9, show_progress=False)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == load_tokenizer(checkpoint / "tokenizer").eos_id
    assert "pad_token_id" not in config and not (tmp_path / "out/generation_config.json").exists()


def _no_checkpoint(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _no_tokenizer(folder: Path) -> Path:
    shutil.rmtree(folder / "copy/tokenizer")
    return folder / "copy"


def _damaged(folder: Path) -> Path:
    for file in (folder / "copy").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    return folder / "copy"


def _flipped(folder: Path) -> Path:
    file = max((folder / "copy").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return folder / "copy"


def _half_configuration(folder: Path) -> Path:
    (folder / "copy/config.json").write_text("{")
    return folder / "copy"


def _run_without_checkpoint(folder: Path) -> Path:
    (folder / "copy/recipe.yaml").touch()
    return folder / "copy"


def _other_model(**changes: Any) -> Any:
    def change(folder: Path) -> Path:
        note = json.loads((folder / "copy/model.json").read_text())
        note["architecture"] |= changes
        del note["xxh3_128"]  # as earlier versions wrote it: without a hash of its own
        (folder / "copy/model.json").write_text(json.dumps(note))
        return folder / "copy"

    return change


BAD_CHECKPOINTS = {
    "an unknown architecture": (_other_model(family="mamba"), "architecture that this version cannot read"),
    "a layer too few": (_other_model(num_layers=4), "is damaged or of another model"),
    "another width": (_other_model(num_attention_heads=4), "does not fit the model"),
    "an untied head": (_other_model(untie_embeddings_and_output_weights=True), "no tensor 'output_layer.weight'"),
    "nothing": (lambda folder: folder / "none", "no checkpoint at"),
    "no checkpoint": (_no_checkpoint, "has no model.json"),
    "no tokenizer": (_no_tokenizer, "give --tokenizer"),
    "damaged": (_damaged, "is damaged"),
    "one bit flipped": (_flipped, "is damaged"),
    "a damaged configuration": (_half_configuration, "config.json is damaged"),
    "a run without a checkpoint": (_run_without_checkpoint, "has no checkpoint yet"),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoints_leave_nothing_behind(case: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    damage, message = BAD_CHECKPOINTS[case]
    origin = damage(tmp_path)
    with pytest.raises(KDError) as raised:
        export(origin, tmp_path / "to/out", max_shard_bytes=10**9, show_progress=False)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "to").exists() or not list((tmp_path / "to").iterdir())


def test_what_is_there_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        export(checkpoint, tmp_path, max_shard_bytes=10**9, show_progress=False)


def test_a_tokenizer_larger_than_the_embedding(source: Path, tmp_path: Path) -> None:
    small = grouped_model(False, vocab_size=331)
    too_large = hf_folder(tmp_path / "small", small)
    with pytest.raises(CheckpointError, match=r"has \d+ tokens, teacher.model.vocab_size is 331"):
        imported(tmp_path, small, too_large)
    assert not (tmp_path / "teacher").exists()
    with pytest.raises(CheckpointError, match=r"has \d+ tokens, the embedding of .* 331"):
        export_weights(
            SafetensorsFolder(too_large), small, tmp_path / "out", tokenizer=load_tokenizer(too_large), kept_from=None
        )


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), ("2gib", 2**31), ("200kb", 200_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 TB", "five"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-shard-size"):
        parse_size(text)


def test_a_number_too_large_for_the_dtype_is_named(source: Path, tmp_path: Path) -> None:
    """bfloat16 holds it, float16 would make it infinite."""
    large = tmp_path / "large"
    shutil.copytree(source, large)
    name = "model.layers.1.mlp.down_proj.weight"
    file = next(file for file in large.glob("*.safetensors") if name in load_file(file))
    weights = load_file(file)
    weights[name][2, 3] = -70144.0
    save_file(weights, file, {"format": "pt"})
    checkpoint = imported(tmp_path, MODELS["llama tied"], large)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} holds 7\.014e\+04, too large for --dtype float16"):
        export(checkpoint, tmp_path / "out", max_shard_bytes=10**9, dtype=torch.float16, show_progress=False)
    assert not (tmp_path / "out").exists()
    export(checkpoint, tmp_path / "out", max_shard_bytes=10**9, dtype=torch.float32, show_progress=False)


def test_what_is_no_dtype() -> None:
    with pytest.raises(ConfigError, match="'int8', must be one of bf16, fp16, fp32"):
        parse_dtype("int8")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"kv_channels": 10', '"kv_channels": 12'), ('"files"', '"fimes"'), ('"parameters": ', '"parameters": 1')],
)
def test_a_changed_note_is_damage(tmp_path: Path, old: str, new: str) -> None:
    """model.json holds the architecture and the hashes of all other files; it has one of its own."""
    from megatron_kd.models.checkpoint import read_note, write_note
    from tests.models_oracles import grouped_model

    write_note(tmp_path, grouped_model(), {}, {"parameters": 12})
    assert read_note(tmp_path)["parameters"] == 12
    note = (tmp_path / "model.json").read_text()
    assert old in note
    (tmp_path / "model.json").write_text(note.replace(old, new))
    with pytest.raises(CheckpointError, match="fails its own hash"):
        read_note(tmp_path)
