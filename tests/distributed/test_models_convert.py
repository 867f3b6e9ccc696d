"""Imports among several ranks: each its shard, one checkpoint, and Hugging Face's bits again in an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_kd.config import ParallelismConfig, load_recipe
from megatron_kd.models.convert import import_model
from megatron_kd.testing import run_distributed
from megatron_kd.training.export_job import export
from tests.models_oracles import grouped_model, hf_folder, import_recipe, tiny_gpt_oss, tiny_qwen3
from tests.unit.test_models_export import same_bits, tensors

TP, PP, EP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "expert_model"))
MODELS = {
    "gpt_oss": tiny_gpt_oss(),
    "llama tied": grouped_model(False, vocab_size=1003, num_layers=2),
    "qwen3": tiny_qwen3(vocab_size=1003, num_layers=2),
}
CASES: list[tuple[str, dict[str, int]]] = [
    ("gpt_oss", {TP: 2, EP: 2}),
    ("gpt_oss", {PP: 2}),
    ("llama tied", {PP: 2}),
    ("llama tied", {}),  # two data-parallel ranks: the second writes nothing
]


def import_rank(rank: int, world: int, recipe: str, layout: dict[str, Any], destination: str) -> Any:
    """The report of an import in a layout, or its error's type and message."""
    from tests.training_runs import leave_layout

    leave_layout()
    overrides = [f"cluster.gpus_per_node={world}", f"teacher.checkpoint={destination}"]
    loaded = load_recipe(Path(recipe), overrides).model_copy(update={"parallelism": ParallelismConfig(**layout)})
    try:
        return import_model(loaded, "teacher", show_progress=False)
    except Exception as error:
        return type(error).__name__, str(error)


def imports_rank(rank: int, world: int, jobs: list[tuple[str, dict[str, int], str]]) -> list[Any]:
    """One import after another."""
    return [import_rank(rank, world, *job) for job in jobs]


DAMAGED = "model.layers.1.mlp.down_proj.weight"


def damaged_recipe(folder: Path) -> Path:
    """A recipe for a Llama of two layers, the second of which has a matrix too narrow."""
    from safetensors.torch import save_file

    source = hf_folder(folder / "hf", MODELS["llama tied"])
    state = tensors(source)
    for file in source.glob("model*"):
        file.unlink()
    state[DAMAGED] = torch.zeros(48, 87, dtype=torch.bfloat16)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    return import_recipe(folder / "recipe", MODELS["llama tied"], source)


def test_imports_in_any_layout_are_exported_bit_by_bit(tmp_path: Path) -> None:
    sources = {name: hf_folder(tmp_path / f"hf {name}", model) for name, model in MODELS.items()}
    recipes = {name: import_recipe(tmp_path / f"r {name}", MODELS[name], source) for name, source in sources.items()}
    jobs = [(str(recipes[name]), layout, str(tmp_path / str(i))) for i, (name, layout) in enumerate(CASES)]
    bad = str(damaged_recipe(tmp_path / "bad")), {PP: 2}, str(tmp_path / "to/checkpoint")
    (*first, again, alone), (*second, _, told) = run_distributed(imports_rank, 2, [*jobs, jobs[0], bad])
    assert first == second and not any(report.reused for report in first)
    assert again.reused and again.parameters == first[0].parameters
    for i, (name, layout) in enumerate(CASES):
        theirs = tensors(sources[name])
        assert first[i].parameters == sum(tensor.numel() for tensor in theirs.values()), (name, layout)
        export(tmp_path / str(i), tmp_path / f"out_{i}", max_shard_bytes=10**9, show_progress=False)
        assert same_bits(tensors(tmp_path / f"out_{i}"), theirs), (name, layout)
        assert (tmp_path / f"out_{i}/generation_config.json").exists()
    # What the second stage alone reads, damaged: both ranks end, and nothing is left.
    assert alone[0] == "RemoteRankError" and told[0] == "CheckpointError"
    assert DAMAGED in told[1] and "(48, 87)" in told[1] and "\n" not in told[1]
    assert not (tmp_path / "to").exists()
