"""Hugging Face models as oracles for the Megatron-Core ones: their weights, logits and gradients, on disk for ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_kd.config import ModelConfig, load_model
from megatron_kd.models.hf_config import hf_config
from tests.assets import ASSETS, ROOT, _locked, smollm2_checkpoint, tiny_llama_folder

SMOLLM2_TOKENS = 126


def grouped_model(untied: bool = True, **changes: Any) -> ModelConfig:
    """A Llama with grouped queries, heads wider than the hidden size, and no two sizes alike."""
    values: dict[str, Any] = {
        "name": "grouped",
        "num_layers": 3,
        "hidden_size": 48,
        "ffn_hidden_size": 88,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 10,
        "vocab_size": 331,
        "max_position_embeddings": 64,
        "rotary_base": 700.0,
        "layernorm_epsilon": 1e-2,
        "untie_embeddings_and_output_weights": untied,
    }
    return ModelConfig.model_validate(values | changes)


def tiny_qwen3(**changes: Any) -> ModelConfig:
    """A Qwen3 with grouped queries and heads wider than the hidden size."""
    return grouped_model(name="tiny_qwen3", family="qwen3", max_position_embeddings=256, **changes)


def scaled_llama(**changes: Any) -> ModelConfig:
    """A Llama with Llama-3 scaling: some wavelengths kept, some divided, some between, well inside 200 positions."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return grouped_model(name="scaled", max_position_embeddings=512, rope_scaling=scaling, **changes)


def tiny_gpt_oss(**changes: Any) -> ModelConfig:
    """The model of ``configs/models/tiny_gpt_oss.yaml``."""
    values = yaml.safe_load((ROOT / "configs/models/tiny_gpt_oss.yaml").read_text())
    return ModelConfig.model_validate(values | changes)


def random_hf_model(model: ModelConfig, seed: int = 11) -> Any:
    """A random Hugging Face model of the architecture, scaled so that whatever is lost or misplaced shows.

    Norms are not all ones, biases not zeros, and the experts' activations reach their clamp.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = hf_config(model)
    # transformers 5 reads rope_parameters.
    for name in ("architectures", "rope_theta", "rope_scaling"):
        del values[name]
    config = AutoConfig.for_model(values.pop("model_type"), **values, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "norm" in name:
                    parameter.copy_(0.5 + torch.rand_like(parameter))
                elif "bias" in name or "sinks" in name:
                    parameter.normal_(0.0, 0.5)
                elif "experts" in name:
                    parameter.mul_(4.0)
    return built.eval()


def tiny_gpt_oss_folder(folder: Path, seed: int = 11) -> ModelConfig:
    """A random GPT-OSS of ``tiny_gpt_oss`` in a new folder, with a tokenizer of its vocabulary, and where it is."""
    random_hf_model(tiny_gpt_oss(), seed).save_pretrained(folder)
    for file in tiny_llama_folder().glob("tokenizer*"):
        shutil.copy(file, folder)
    return tiny_gpt_oss(hf=str(folder))


def write_oracle(
    built: Any, folder: Path, vocab_size: int, tokens: int = 24, documents: list[int] | None = None
) -> Path:
    """Saves tokens [2, s], labels, the logits [2, s, V] and the gradients of Σ cross-entropy of an HF model.

    Args:
        documents: lengths that a row of ``tokens`` is packed of; each is given to the model alone. Also saved, as the
            number of its document for each token [2, s].
    """
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, vocab_size, (2, tokens), generator=generator)
    labels = torch.randint(0, vocab_size, (2, tokens), generator=generator)
    lengths = documents or [tokens]
    logits = torch.cat([built(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    oracle: dict[str, Any] = {"tokens": ids, "labels": labels, "logits": logits.detach()}
    oracle["grads"] = {name: p.grad for name, p in built.named_parameters()}
    if documents is not None:
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        oracle["documents"] = numbers[None].expand_as(ids).contiguous()
    torch.save(oracle, folder / "oracle.pt")
    return folder


def variants(
    folder: Path,
    models: list[ModelConfig],
    tokens: int = 24,
    seed: int = 11,
    documents: list[int] | None = None,
) -> list[tuple[dict[str, Any], str]]:
    """Architectures, each with the folder of its random weights and its oracle."""
    listed = []
    for i, model in enumerate(models):
        built, path = random_hf_model(model, seed), folder / f"{i}_{model.name}"
        # Several files with an index, as large models come.
        built.save_pretrained(path, max_shard_size="60KB")
        write_oracle(built, path, model.vocab_size, tokens, documents)
        listed.append((model.model_dump(mode="json"), str(path)))
    return listed


def smollm2_model() -> ModelConfig:
    """The architecture of SmolLM2-135M."""
    return load_model("smollm2_135m", ROOT)


def smollm2_hf_folder() -> Path:
    """SmolLM2 as safetensors with ``oracle.pt``: 126 tokens of English text and the logits of Hugging Face's model.

    Made once (20 s): transformers takes its time to read the GGUF file.
    """
    from pydoc_data.topics import topics

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_kd.models.hf_source import resolve_source

    checkpoint = smollm2_checkpoint()
    folder = ASSETS / "smollm2_dequantised"
    with _locked("smollm2_dequantised"):
        if not (folder / "oracle.pt").exists():
            source = smollm2_model().hf
            assert source is not None
            path = resolve_source(source)
            built = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
            ids = torch.tensor([tokenizer(topics["assignment"])["input_ids"][:SMOLLM2_TOKENS]])
            with torch.no_grad():
                logits = built(ids).logits
            # Not save_pretrained, which refuses models read from GGUF although they are dequantised.
            folder.mkdir(exist_ok=True)
            state = {name: value for name, value in built.state_dict().items() if name != "lm_head.weight"}
            save_file(state, folder / "model.safetensors")
            config = json.loads(built.config.to_json_string(use_diff=False))
            del config["quantization_config"]  # what the file was, not what these weights are
            (folder / "config.json").write_text(json.dumps(config))
            torch.save({"tokens": ids, "logits": logits}, folder / "oracle.pt")
    return folder


def one_rank_groups(folder: Path) -> Any:
    """The groups of one rank on the CPU in this process; ``folder`` is for the rendezvous."""
    import torch.distributed as dist

    from megatron_kd.config import ParallelismConfig
    from megatron_kd.device import select_device
    from megatron_kd.models.parallel import init_model_parallel

    select_device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    return init_model_parallel(ParallelismConfig(), seed=3)


def hf_folder(folder: Path, model: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Random weights as they are published: several files in ``dtype``, special tokens, a tokenizer, generation_config.

    The tokenizer is tiny_llama's; the model's vocabulary must be as large.
    """
    import shutil

    from tests.assets import tiny_llama_folder

    built = random_hf_model(model).to(dtype)
    built.config.update({"bos_token_id": 5, "eos_token_id": 0, "pad_token_id": 7})
    built.generation_config.update(eos_token_id=[0, 2], pad_token_id=7, temperature=0.7, do_sample=True)
    built.save_pretrained(folder, max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_folder() / name, folder / name)
    return folder


def import_recipe(folder: Path, model: ModelConfig, source: Path, **sections: Any) -> Path:
    """A recipe whose teacher is ``model`` with the weights of ``source``, its checkpoint in ``folder``."""
    from tests.assets import tiny_recipe

    path = tiny_recipe(folder, **sections)
    recipe = yaml.safe_load(path.read_text())
    recipe["teacher"]["model"] = {**model.model_dump(mode="json"), "hf": str(source)}
    if "student" not in sections:
        recipe["student"] = {"from_teacher": {"keep_every": 2}}
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
