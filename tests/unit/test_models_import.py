"""Hugging Face weights into Megatron-Core's shapes: packing, wrong choices, wrong or damaged sources, operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_kd.config import ModelConfig, ParallelismConfig, load_recipe
from megatron_kd.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_kd.models import families
from megatron_kd.models.build import build_model
from megatron_kd.models.convert import _check_same_source, import_model
from megatron_kd.models.families.layouts import GateAndUp, QueryKeyValue
from megatron_kd.models.flops import forward_flops_per_token, training_flops_per_token
from megatron_kd.models.hf_config import check_architecture
from megatron_kd.models.hf_source import SafetensorsFolder, open_hf_weights, weights_sha256
from megatron_kd.models.load import load_hf_weights
from megatron_kd.models.parameters import places
from megatron_kd.models.vocabulary import padded_vocab_size
from tests.assets import tiny_recipe
from tests.models_oracles import grouped_model, random_hf_model

TOKENS = torch.randint(0, 331, (2, 24), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grouped Llama in one file, and ``logits.pt``."""
    folder = tmp_path_factory.mktemp("grouped")
    built = random_hf_model(grouped_model())
    built.save_pretrained(folder)
    with torch.no_grad():
        torch.save(built(TOKENS).logits, folder / "logits.pt")
    return folder


def logits_of(model: ModelConfig, source: Path, groups: Any) -> torch.Tensor:
    """[2, 24, V] of the imported model, with the recipe's architecture taken at its word."""
    built = build_model(model, ParallelismConfig(), groups, "fp32", trainable=False)
    load_hf_weights(built, model, SafetensorsFolder(source), groups)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        logits: torch.Tensor = built(TOKENS, positions, None)
    return logits[..., : model.vocab_size]


def test_imported_logits_are_hugging_faces(source: Path, groups: Any) -> None:
    expected = torch.load(source / "logits.pt")
    torch.testing.assert_close(logits_of(grouped_model(), source, groups), expected, rtol=0, atol=1e-5)


class _Wrong:
    """A layout that packs otherwise."""

    def __init__(self, pack: Callable[[Sequence[torch.Tensor]], torch.Tensor], paired: bool) -> None:
        self.pack, self.paired = pack, paired

    def to_megatron(self, tensors: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
        return self.pack(list(tensors))

    def to_hf(self, tensor: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
        raise NotImplementedError


def _value_before_key(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return QueryKeyValue().to_megatron([tensors[0], tensors[2], tensors[1]], grouped_model())


def _interleaved(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors), dim=1).reshape(2, -1, tensors[0].shape[1])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("linear_qkv", _Wrong(lambda tensors: torch.cat(list(tensors)), False)),
        ("linear_qkv", _Wrong(_value_before_key, False)),
        ("linear_fc1", _Wrong(lambda tensors: torch.stack(list(tensors)[::-1]), True)),
        ("linear_fc1", _Wrong(_interleaved, True)),
    ],
    ids=["queries first", "value before key", "up before gate", "gate and up interleaved"],
)
def test_every_wrong_packing_shows(
    name: str, wrong: _Wrong, source: Path, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    llama = families.FAMILIES["llama"]
    layer = tuple(replace(e, layout=wrong) if name in e.megatron else e for e in llama.layer)
    assert layer != llama.layer
    monkeypatch.setitem(families.FAMILIES, "llama", replace(llama, layer=layer))
    assert (logits_of(grouped_model(), source, groups) - torch.load(source / "logits.pt")).abs().max() > 0.05


@pytest.mark.parametrize(
    "changes",
    [{"rotary_base": 701.0 * 2}, {"layernorm_epsilon": 2e-2}, {"untie_embeddings_and_output_weights": False}],
    ids=str,
)
def test_every_wrong_setting_shows_and_is_refused(
    changes: dict[str, Any], source: Path, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grouped_model(**changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        logits_of(model, source, groups)
    monkeypatch.setattr("megatron_kd.models.load.check_architecture", lambda model, hf: None)
    if "untie_embeddings_and_output_weights" in changes:
        # A head of its own beside the embedding gives it away, whatever the configuration says.
        with pytest.raises(CheckpointError, match=r"lm_head.weight.*other values.*is tied"):
            logits_of(model, source, groups)
        monkeypatch.setattr("megatron_kd.models.load._check_repeated_head", lambda model, weights: None)
    assert (logits_of(model, source, groups) - torch.load(source / "logits.pt")).abs().max() > 0.01


def test_query_key_value_are_packed_by_group() -> None:
    model = grouped_model(num_attention_heads=4, num_query_groups=2, kv_channels=2, hidden_size=1)
    q, k, v = torch.arange(8.0)[:, None], 100 + torch.arange(4.0)[:, None], 200 + torch.arange(4.0)[:, None]
    packed = QueryKeyValue().to_megatron([q, k, v], model).flatten().tolist()
    assert packed == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_shards_hold_gate_rows_then_up_rows(groups: Any) -> None:
    from dataclasses import replace

    model = grouped_model()
    place = next(place for place in places(model) if "linear_fc1" in place.entry.megatron)
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    whole = GateAndUp().to_megatron([gate, up], model)
    ranks = [replace(groups, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert [place.shard(whole, model, rank).flatten().tolist() for rank in ranks] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_padding_rows_are_zero(source: Path, groups: Any) -> None:
    built = build_model(grouped_model(), ParallelismConfig(), groups, "fp32", trainable=False)
    load_hf_weights(built, grouped_model(), SafetensorsFolder(source), groups)
    for weight in (built.embedding.word_embeddings.weight, built.output_layer.weight):
        assert weight.shape[0] == 384 and not weight[331:].any() and weight[:331].abs().sum(dim=1).min() > 0


@given(st.integers(2, 300_000), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_padded_vocab_size(vocab: int, tp: int) -> None:
    padded = padded_vocab_size(vocab, tp)
    assert padded % (128 * tp) == 0 and vocab <= padded < vocab + 128 * tp


def test_the_known_padded_sizes() -> None:
    # 201,088 is padded to these by Megatron-LM itself.
    assert [padded_vocab_size(201088, tp) for tp in (1, 4, 8)] == [201088, 201216, 201728]


def test_flops_are_those_of_the_real_model(groups: Any) -> None:
    """torch's own count of the matrix products; those of attention compute the whole square, not half of it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = grouped_model(vocab_size=384)  # no padding, which the formula leaves out
    built = build_model(model, ParallelismConfig(), groups, "fp32", trainable=True)
    tokens = TOKENS.clamp(max=330)
    positions = torch.arange(24).expand_as(tokens)
    # The fused attention of the CPU is not counted; the plain one computes the same with matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = built(tokens, positions, None)
        forward = counter.get_total_flops()
        output.sum().backward()
    upper_half = model.num_layers * 2 * 2 * model.num_attention_heads * model.kv_channels * 12
    assert forward == tokens.numel() * (forward_flops_per_token(model, 24) + upper_half)
    # The first layer's input is an embedding, which needs its gradient too: exactly three times the forward pass.
    assert counter.get_total_flops() == tokens.numel() * (training_flops_per_token(model, 24) + 3 * upper_half)


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def _edit_weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit_file(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors")

    return edit_file


def _truncate(name: str) -> Callable[[Path], None]:
    def truncate(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return truncate


BIAS = "model.layers.0.self_attn.q_proj.bias"
BAD_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "half a config": (_truncate("config.json"), "config.json is damaged"),
    "half the weights": (_truncate("model.safetensors"), "model.safetensors is missing or damaged"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "an index of garbage": (lambda p: (p / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
    "an index of nothing": (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "another family": (_edit_config(model_type="qwen3"), "'qwen3'"),
    "another activation": (_edit_config(hidden_act="gelu"), "'gelu'"),
    "wider": (_edit_config(hidden_size=64), "hidden_size 64"),
    "scaled positions": (_edit_config(rope_parameters={"rope_type": "llama3", "rope_theta": 700.0}), "'llama3'"),
    "old scaled positions": (
        _edit_config(rope_parameters=None, rope_theta=700.0, rope_scaling={"type": "linear", "factor": 2.0}),
        "'linear'",
    ),
    "a tensor missing": (_edit_weights(lambda s: s.pop("model.norm.weight")), "no tensor 'model.norm.weight'"),
    "a bias too many": (_edit_weights(lambda s: s.update({BIAS: torch.zeros(80)})), BIAS),
    "fewer rows": (
        _edit_weights(lambda s: s.update({"model.embed_tokens.weight": torch.zeros(330, 48)})),
        "330 rows for a vocabulary of 331",
    ),
    "as many rows as padded": (
        _edit_weights(lambda s: s.update({"lm_head.weight": torch.zeros(384, 48)})),
        "384 rows for a vocabulary of 331",
    ),
    "fewer queries": (
        _edit_weights(lambda s: s.update({"model.layers.1.self_attn.q_proj.weight": torch.zeros(40, 48)})),
        "40 query rows for 8 heads of 10 channels",
    ),
    "a key of another width": (
        _edit_weights(lambda s: s.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(40, 47)})),
        "model.layers.1.self_attn.k_proj.weight",
    ),
    "a transposed matrix": (
        _edit_weights(lambda s: s.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(88, 48)})),
        "decoder.layers.2.mlp.linear_fc2.weight",
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources_are_refused(case: str, source: Path, groups: Any, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    damage, message = BAD_SOURCES[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        logits_of(grouped_model(), tmp_path, groups)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_config_that_leaves_out_defaults_is_understood() -> None:
    """Older files say nothing of what LlamaConfig has as default."""
    model = grouped_model(
        num_query_groups=8, kv_channels=6, rotary_base=10000.0, layernorm_epsilon=1e-6, vocab_size=32000
    )
    config = {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
    }
    check_architecture(model, config)
    for field, value in (("rotary_base", 5e5), ("layernorm_epsilon", 1e-5), ("num_query_groups", 4)):
        with pytest.raises(CheckpointError, match=field):
            check_architecture(model.model_copy(update={field: value}), config)


def test_several_files_with_an_index_are_one_source(source: Path, tmp_path: Path) -> None:
    random_hf_model(grouped_model()).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and not (tmp_path / "model.safetensors").exists()
    assert weights_sha256(SafetensorsFolder(tmp_path)) == weights_sha256(SafetensorsFolder(source))


def test_the_hash_sees_values_names_and_dtypes(source: Path, tmp_path: Path) -> None:
    state = load_file(source / "model.safetensors")
    hashes = {weights_sha256(SafetensorsFolder(source))}
    for change in (
        {"model.norm.weight": state["model.norm.weight"] + 1e-3},
        {"model.norm.weight": state["model.norm.weight"].half()},
        {"extra": torch.tensor(1.0)},
    ):
        save_file({**state, **change}, tmp_path / "model.safetensors")
        hashes.add(weights_sha256(SafetensorsFolder(tmp_path)))
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ("/nowhere/at/all", "does not exist"),
        ("package:no_such_package_at_all/x.gguf", "is not installed"),
        (__file__, "neither a folder of safetensors nor a .gguf file"),
    ],
)
def test_sources_that_are_none(hf: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_hf_weights(hf)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        open_hf_weights(str(tmp_path / "model.gguf"))


def test_an_import_is_reused_only_for_its_own_source(tmp_path: Path) -> None:
    note = {"source": str(tmp_path / "base"), "parameters": 1, "weights_sha256": "0"}
    _check_same_source(tmp_path, note, str(tmp_path / "x" / ".." / "base"))
    _check_same_source(tmp_path, note, None)
    with pytest.raises(CheckpointError, match=r"was imported from .*base.*, the recipe names .*chat"):
        _check_same_source(tmp_path, note, str(tmp_path / "chat"))
    with pytest.raises(CheckpointError, match="is not an imported model"):
        _check_same_source(tmp_path, {"architecture": {}}, str(tmp_path / "base"))


def test_a_damaged_import_is_not_reused(tmp_path: Path) -> None:
    recipe = load_recipe(tiny_recipe(tmp_path))
    done = import_model(recipe, "teacher", show_progress=False)
    assert import_model(recipe, "teacher", show_progress=False).reused
    file = next(done.checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"{file.name} has .* bytes of .*remove it, and import again"):
        import_model(recipe, "teacher", show_progress=False)


def test_a_teacher_is_frozen_in_its_precision(groups: Any) -> None:
    built = build_model(grouped_model(untied=False), ParallelismConfig(), groups, "bf16", trainable=False)
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in built.parameters())
