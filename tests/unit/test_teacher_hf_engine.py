"""The transformers engine against transformers' own logits in float64, whatever a family does to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.config import Recipe, load_recipe
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.hf_source import open_hf_weights, weights_sha256
from megatron_kd.teacher.documents_apart import document_spans, portions
from megatron_kd.teacher.engine import TeacherEngine
from megatron_kd.teacher.hf_engine import HFTeacher
from tests.assets import tiny_llama_folder, tiny_recipe
from tests.unit.test_teacher_topk import tail_of

V, D, TOP_K = 211, 24, 12
SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **WIDE, "head_dim": 6, "tie_word_embeddings": True},
    "llama3_rope": {
        **SIZES,
        **WIDE,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "cohere": {**SIZES, **WIDE, "logit_scale": 0.25},
    "granite": {**SIZES, **WIDE, "logits_scaling": 3.0},
    "qwen2": {**SIZES, **WIDE},
    "gpt2": {**SIZES, "n_positions": 64, "initializer_range": 0.3},
    "gptj": {**SIZES, "n_positions": 64, "rotary_dim": 4, "initializer_range": 0.3},
    "phi": {**SIZES, **WIDE, "partial_rotary_factor": 0.67},
    "gemma2": {**SIZES, **WIDE, "head_dim": 6, "final_logit_softcapping": 1.5},
    "gemma3_text": {**SIZES, **WIDE, "head_dim": 6, "final_logit_softcapping": 1.5},
    "recurrent_gemma": {**SIZES, **WIDE, "logits_soft_cap": 1.5, "lru_width": D, "attention_window_size": 32},
}


def save(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of a family as ``save_pretrained`` writes it, every bias filled with what is not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**FAMILIES.get(name, {**SIZES, **WIDE}), **TOKENS, **changes}
    config = AutoConfig.for_model(values.pop("model_type", name), **values)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def recipe_of(folder: Path, source: Path, *overrides: str) -> Recipe:
    """A recipe whose teacher is the model in ``source``, described by the sizes above and the rest of its config."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    model = {
        "name": "teacher",
        "num_layers": 2,
        "hidden_size": D,
        "ffn_hidden_size": 40,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 6,
        "vocab_size": V,
        "max_position_embeddings": 64,
        "rotary_base": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4)),
        "layernorm_epsilon": float(getattr(config, "rms_norm_eps", 1e-5)),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "hf": str(source),
    }
    teacher = {
        "model": model,
        "engine": "hf",
        "top_k": TOP_K,
        "temperatures": [1.0, 2.0],
        "checkpoint": None,
    }
    path = tiny_recipe(folder, teacher=teacher, data={"seq_length": 32}, student={"from_teacher": {"keep_every": 2}})
    return load_recipe(path, list(overrides))


def own_logits(source: Path, tokens: Tensor) -> Tensor:
    """Float64 logits [s·b, V], sequence first, of the whole transformers model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits.transpose(0, 1).reshape(-1, V)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_targets_are_those_of_the_models_own_logits(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "model", name)
    teacher: TeacherEngine = HFTeacher(recipe_of(tmp_path, source, "loss.chunk_mib=0.01"))
    tokens = torch.randint(0, V, (3, 32), generator=torch.Generator().manual_seed(1))
    got = teacher.top_k(tokens)
    assert got is not None
    logits = own_logits(source, tokens)
    assert logits.std() > 0.1, "a flat model shows nothing"
    ids = got.targets.ids.long()
    for temperature in (1.0, 2.0):
        exact = (logits / temperature).log_softmax(dim=1)
        logprobs, tail = got.targets.logprobs.double(), got.targets.tail_logmass
        if temperature != 1.0:
            normalizer, tail = got.log_normalizers[temperature]
            logprobs = logprobs / temperature - normalizer.double()[:, None]
        torch.testing.assert_close(logprobs, exact.topk(TOP_K, dim=1).values, rtol=0, atol=5e-5)
        torch.testing.assert_close(logprobs, exact.gather(1, ids), rtol=0, atol=5e-5)
        torch.testing.assert_close(tail.double(), tail_of(exact, ids), rtol=0, atol=5e-5)
    assert got.targets.temperature == 1.0 and list(got.log_normalizers) == [2.0]


def test_the_head_is_never_applied_to_all_tokens(tmp_path: Path) -> None:
    teacher = HFTeacher(recipe_of(tmp_path, save(tmp_path / "model", "qwen2")))

    def forbidden(*_: Any) -> None:
        raise AssertionError("logits of all tokens were made")

    teacher._loaded.model.get_output_embeddings().register_forward_pre_hook(forbidden)
    assert teacher.top_k(torch.zeros(2, 32, dtype=torch.int64)).targets.ids.shape == (64, TOP_K)


def test_sixteen_bits_stay_near(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "phi", hidden_size=D)
    tokens = torch.randint(0, V, (1, 32), generator=torch.Generator().manual_seed(1))
    exact = own_logits(source, tokens).log_softmax(dim=1)
    for dtype in ("bf16", "fp16"):
        teacher = HFTeacher(recipe_of(tmp_path, source, f"teacher.hf.dtype={dtype}"))
        got = teacher.top_k(tokens).targets
        error = (got.logprobs.double() - exact.gather(1, got.ids.long())).abs()
        assert error.mean() < {"bf16": 0.1, "fp16": 0.02}[dtype]
        assert teacher.identity()["dtype"] == dtype


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0, which must be a positive number"),
        ("bert", {"is_decoder": True}, "'bert' model are not its last hidden states times its output head"),
        ("electra", {"is_decoder": True, "embedding_size": 16}, "the engine hf cannot run a 'electra' model"),
        ("cohere", {"logit_scale": -1.0, **ROPE}, "logit_scale -1.0, which must be a positive number"),
        ("qwen2", {"vocab_size": V + 5}, f"vocab_size {V + 5}, teacher.model 'teacher' says {V}"),
        ("qwen2", {"num_hidden_layers": 3}, "num_layers 3, teacher.model 'teacher' says 2"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            "rotary_base 7.0, teacher.model 'teacher' says 10000.0",
        ),
    ],
)
def test_models_that_are_not_what_is_computed(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    source = save(tmp_path / "model", name, **changes)
    with pytest.raises(CheckpointError) as caught:
        HFTeacher(recipe_of(tmp_path, source, "teacher.model.rotary_base=10000.0"))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_do_not_fill_the_model(tmp_path: Path) -> None:
    """transformers would go on with random values for what is missing."""
    from safetensors.torch import load_file, save_file

    source = save(tmp_path / "model", "qwen2")
    file = source / "model.safetensors"
    whole = load_file(file)
    missing = "model.layers.1.mlp.up_proj.weight"
    for change, words in (
        ({name: tensor for name, tensor in whole.items() if name != missing}, f"lacks '{missing}' (1 such tensors)"),
        ({**whole, "model.layers.0.extra.weight": torch.ones(3)}, "no place in the model for 'model.layers.0.extra"),
        ({**whole, missing: torch.ones(2, 2)}, "cannot be loaded by transformers"),
    ):
        save_file(change, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as caught:
            HFTeacher(recipe_of(tmp_path, source))
        assert words in str(caught.value)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing or damaged"):
        HFTeacher(recipe_of(tmp_path, source))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher.model.hf=null"], ["teacher.model.hf is not set"]),
        (["teacher.model.hf=/nowhere"], ["'/nowhere', which does not exist"]),
        (
            ["parallelism.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"],
            ["tensor_model_parallel_size 1, not 2", "every layout"],
        ),
        (["teacher.hf.device_map=auto"], ["device_map is 'auto'", "cluster.gpu is 'cpu'"]),
        (
            ["teacher.hf.device_map=auto", "cluster.gpus_per_node=2"],
            ["device_map 'auto' takes all GPUs", "gpus_per_node is 2", "or device_map to null"],
        ),
        (["teacher.mode=online", "teacher.targets=full"], ["engine 'hf' only captures", "teacher.mode to offline"]),
        (["teacher.engine=megatron", "teacher.hf.dtype=bf16"], ["hf is set, but engine is 'megatron'"]),
        (["teacher.engine=h"], ["teacher.engine is 'h'", "'megatron', 'hf' or 'vllm'"]),
        (["teacher.hf.device_map=balance"], ["teacher.hf.device_map is 'balance'", "'balanced_low_0'"]),
    ],
)
def test_recipes_that_are_refused(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    source = save(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError) as caught:
        HFTeacher(recipe_of(tmp_path, source, *overrides))
    for word in words:
        assert word in str(caught.value)


def test_the_identity_is_that_of_the_weights_and_of_what_they_compute(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_llama_folder(), source)
    path = tiny_recipe(tmp_path, teacher={"engine": "hf", "checkpoint": None})
    recipe = load_recipe(path, [f"teacher.model.hf={source}"])
    identity = HFTeacher(recipe).identity()
    assert identity["weights_sha256"] == weights_sha256(open_hf_weights(str(source))), "as an import notes it"
    assert (identity["engine"], identity["dtype"], identity["model_type"]) == ("hf", "fp32", "llama")
    wanted = {key: value for key, value in recipe.teacher.model.model_dump(mode="json").items() if key != "hf"}
    assert identity["architecture"] == wanted, "all of it was compared, so that training accepts the cache"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9.9", "use_cache": False}))
    assert HFTeacher(recipe).identity() == identity
    (source / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    assert HFTeacher(recipe).identity()["config_sha256"] != identity["config_sha256"]


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
def test_packed_documents_are_answered_for_as_if_alone(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "model", name)
    teacher = HFTeacher(recipe_of(tmp_path, source))
    tokens = torch.randint(0, V, (2, 32), generator=torch.Generator().manual_seed(1))
    lengths = [[9, 1, 15, 7], [32]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths])
    got = teacher.top_k(tokens, documents).targets
    logprobs, ids = got.logprobs.unflatten(0, (32, 2)), got.ids.unflatten(0, (32, 2))
    for row, parts in enumerate(lengths):
        for part, where in zip(tokens[row].split(parts), torch.arange(32).split(parts), strict=True):
            exact = own_logits(source, part[None]).log_softmax(dim=1)
            chosen = exact.gather(1, ids[where, row].long())
            torch.testing.assert_close(logprobs[where, row].double(), chosen, rtol=0, atol=5e-5)
            torch.testing.assert_close(chosen, exact.topk(TOP_K, dim=1).values, rtol=0, atol=5e-5)
    assert len(portions(document_spans(documents), 64)) == 2, "short ones go together"
