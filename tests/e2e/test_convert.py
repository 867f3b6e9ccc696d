"""Weights in and out by the command line: trained students, ranks, refusals, and SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_kd.config import ModelConfig, ParallelismConfig
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.models.hf_source import open_hf_weights, weights_sha256
from tests.assets import ROOT, smollm2_checkpoint, succeed, tiny_llama_folder, tiny_recipe
from tests.e2e.road import captured_road, one_error_line
from tests.models_oracles import one_rank_groups
from tests.warm import start, warm


def trained(recipe: Path, run: Path, *overrides: str) -> Path:
    """A run of two checkpoints."""
    lengths = ("training.train_iters=4", "checkpoint.save_interval=2")
    succeed(warm("train", recipe, f"run_dir={run}", *lengths, *overrides, timeout=240.0))
    return run


def figures(done: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeed(done).stdout)
    return found


def largest_gap(checkpoint: Path, exported: Path, tokens: torch.Tensor, folder: Path) -> float:
    """Between the logits [1, s, V] of a training checkpoint in Megatron-Core and of its export in transformers."""
    from transformers import AutoModelForCausalLM

    from megatron_kd.models.build import build_model
    from megatron_kd.models.checkpoint import load_weights, read_note

    model = ModelConfig.model_validate(read_note(checkpoint)["architecture"])
    built = build_model(model, ParallelismConfig(), one_rank_groups(folder), "fp32", trainable=False)
    load_weights(built, model, checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", attn_implementation="eager").eval()
    assert theirs.dtype == torch.float32 and theirs.config.num_hidden_layers == model.num_layers
    with torch.no_grad():
        ours = built(tokens, torch.arange(tokens.shape[1])[None], None)[..., : model.vocab_size]
        gap = (ours - theirs(tokens).logits).abs().max()
    return float(gap)


def test_a_trained_student_goes_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = trained(captured_road() / "recipe.yaml", tmp_path / "run")
    report = figures(warm("convert", "export", run, "--output", tmp_path / "out", "--json"))
    assert report["checkpoint"] == str(run / "checkpoints/iter_0000004") and report["dtype"] == "float32"
    tokens = torch.randint(0, 1003, (1, 48), generator=torch.Generator().manual_seed(6))
    assert largest_gap(run / "checkpoints/iter_0000004", tmp_path / "out", tokens, tmp_path) < 2e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    # An earlier checkpoint by its own path, in files of another size, and it is another student.
    first = run / "checkpoints/iter_0000002"
    line = ("--output", tmp_path / "first", "--max-shard-size", "100KB", "--dtype", "bf16")
    done = succeed(warm("convert", "export", first, *line))
    assert f"{tmp_path / 'first'}: {report['parameters']:,} parameters of {first} in bfloat16, " in done.stdout
    ours, other = (open_hf_weights(str(tmp_path / name)) for name in ("out", "first"))
    assert ours.names() == other.names() and not any("optimizer" in name for name in ours.names())
    changed = [name for name in ours.names() if not torch.equal(ours.read(name).bfloat16(), other.read(name))]
    assert len(changed) > len(ours.names()) // 2


def test_what_was_exported_is_imported_again(tmp_path: Path) -> None:
    """On two ranks at TP 2, as torchrun starts them: one report, and the same weights."""
    road = captured_road()
    succeed(warm("convert", "export", road / "teacher", "--output", tmp_path / "out"))
    assert weights_sha256(open_hf_weights(str(tmp_path / "out"))) == weights_sha256(
        open_hf_weights(str(tiny_llama_folder()))
    )
    overrides = [f"teacher.model.hf={tmp_path / 'out'}", f"teacher.checkpoint={tmp_path / 'again'}"]
    layout = ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"]
    line: list[str | Path] = ["convert", "import", road / "recipe.yaml", *overrides]
    first, second = start(*line, *layout, "--json", ranks=2).wait()
    assert succeed(second).stdout == "" and not figures(first)["reused"]
    for name in ("config.json", "generation_config.json", "tokenizer/tokenizer.json"):
        assert (tmp_path / "again" / name).exists()
    # Alone, the same recipe needs no second rank.
    assert figures(warm(*line, *layout, "--json"))["reused"]
    # Another number of ranks than the recipe's is neither.
    for done in start(*line, ranks=2).wait():
        assert done.returncode == 2
    succeed(warm("convert", "export", tmp_path / "again", "--output", tmp_path / "out2"))
    assert weights_sha256(open_hf_weights(str(tmp_path / "out2"))) == weights_sha256(
        open_hf_weights(str(tmp_path / "out"))
    )


def test_refusals_of_the_command_line(tmp_path: Path) -> None:
    road = captured_road()
    out = tmp_path / "out"
    one_error_line(warm("convert", "export", road / "teacher", "--output", tmp_path), str(tmp_path), "exists already")
    one_error_line(warm("convert", "export", tmp_path / "no", "--output", out), str(tmp_path / "no"), "no checkpoint")
    one_error_line(warm("convert", "export", road, "--output", out), "no checkpoint yet")
    one_error_line(warm("convert", "export", road / "samples", "--output", out), "has no model.json")
    for option, value in (("--dtype", "int4"), ("--max-shard-size", "big")):
        one_error_line(warm("convert", "export", road / "teacher", "--output", out, option, value), option, value)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    one_error_line(warm("convert", "export", road / "teacher", "--output", blocked / "out"), str(blocked))
    assert not out.exists()
    # A pickle is read only where it is allowed.
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    stored = open_hf_weights(str(tiny_llama_folder()))
    torch.save({name: stored.read(name).clone() for name in stored.names()}, pickled / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (pickled / name).write_bytes((tiny_llama_folder() / name).read_bytes())
    line = ("convert", "import", road / "recipe.yaml", f"teacher.model.hf={pickled}", f"teacher.checkpoint={out}")
    one_error_line(warm(*line), "pytorch_model.bin", "--allow-pickle")
    assert figures(warm(*line, "--allow-pickle", "--json"))["weights_sha256"] == weights_sha256(stored)


@pytest.mark.slow
def test_smollm2_after_a_short_training_goes_to_transformers(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    model = yaml.safe_load((ROOT / "configs/models/smollm2_135m.yaml").read_text())
    recipe = tiny_recipe(
        tmp_path,
        data={"seq_length": 24, "train_tokens": 24 * 8, "heldout_tokens": None},
        teacher={"model": model, "checkpoint": str(smollm2_checkpoint()), "top_k": 100},
        student={"from_teacher": {"keep_layers": list(range(0, 30, 3))}},
        training={"global_batch_size": 1},
    )
    for step in ("prepare", "capture"):
        succeed(warm(step, recipe, timeout=240.0))
    run = trained(recipe, tmp_path / "run")
    succeed(warm("convert", "export", run, "--output", tmp_path / "out", "--max-shard-size", "100MB"))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.identity()["sha256"] == load_tokenizer(smollm2_checkpoint() / "tokenizer").identity()["sha256"]
    tokens = torch.tensor(tokenizer.encode(topics["assignment"])[:126].astype("int64"))[None]
    assert largest_gap(run / "checkpoints/iter_0000004", tmp_path / "out", tokens, tmp_path) < 2e-4
