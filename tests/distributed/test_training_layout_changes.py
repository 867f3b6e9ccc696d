"""Training checkpoints loaded in other layouts than they were saved in, parallel in whatever way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_kd.config import ModelConfig, load_model, load_recipe
from megatron_kd.testing import run_distributed
from tests import layouts_table
from tests.assets import ROOT, tiny_recipe
from tests.distributed.test_models_parity import CP, EP, PP, SP, TP, VP, join
from tests.models_oracles import random_hf_model, tiny_gpt_oss
from tests.training_runs import Layout

TIED = {"untie_embeddings_and_output_weights": False}  # two stages then hold the embedding
MODELS = {"gpt_oss": tiny_gpt_oss(), "llama": load_model("tiny_llama", ROOT).model_copy(update=TIED)}
TWO: dict[str, list[dict[str, Any]]] = {
    "gpt_oss": [{}, {TP: 2, SP: True}, {PP: 2}, {PP: 2, VP: 2}, {EP: 2}, {CP: 2}],
    "llama": [{PP: 2}, {PP: 2, VP: 2}, {CP: 2}],
}
FOUR = {"gpt_oss": {PP: 2, EP: 2}, "llama": {TP: 2, SP: True, PP: 2, VP: 2}}
BEFORE, ROWS, SEQ = 3, 4, 24


def student_of(recipe: Path, model: ModelConfig, hf: str, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """A student in a layout, as Hugging Face's weights start it, with its optimizer; and the groups."""
    from megatron_kd.models.build import build_chunks
    from megatron_kd.models.hf_source import open_hf_weights
    from megatron_kd.models.load import load_hf_weights
    from megatron_kd.training.setup import wrap_for_training

    layout, groups = join(**sizes)
    built = build_chunks(model, layout, groups, "fp32")
    load_hf_weights(built, model, open_hf_weights(hf), groups)
    return wrap_for_training(load_recipe(recipe), groups, built), groups


def step(student: Any, groups: Any, model: ModelConfig) -> list[float]:
    """One optimizer step of next-token cross-entropy on rows of the iteration: loss per token and gradient norm."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_kd.models.schedule import run_schedule

    generator = torch.Generator().manual_seed(student.iteration)
    rows = torch.randint(0, model.vocab_size, (ROWS, SEQ + 1), generator=generator)
    total, at = torch.zeros(()), groups.context.positions(SEQ)

    def forward(module: Any, row: torch.Tensor) -> Any:
        return module(row[None, at], at[None], None), lambda local: loss(local, row)

    def loss(local: torch.Tensor, row: torch.Tensor) -> Any:
        start = groups.tp_rank * local.shape[-1]
        padding = torch.arange(start, start + local.shape[-1]) >= model.vocab_size
        local = local.masked_fill(padding, -1e9).transpose(0, 1)
        summed = vocab_parallel_cross_entropy(local, row[None, at + 1].t().contiguous()).sum()
        if groups.tp_rank == 0:
            total.add_(summed.detach())
        return summed, torch.tensor(len(at), dtype=torch.int), None

    for chunk in student.chunks:
        chunk.zero_grad_buffer()
    student.optimizer.zero_grad()
    mine = list(rows[groups.dp_rank :: groups.dp_size])
    run_schedule(
        student.wrapped,
        groups,
        mine,
        forward,
        number=len(mine),
        seq_length=SEQ,
        micro_batch_size=1,
        forward_only=False,
    )
    _, norm, _ = student.optimizer.step()
    student.scheduler.step(increment=ROWS)
    student.iteration += 1
    dist.all_reduce(total)
    return [float(total) / (ROWS * SEQ), float(norm)]


def unlike(student: Any, groups: Any, model: ModelConfig, path: Path) -> list[str]:
    """Parameters that are not bit by bit what one process reads from a checkpoint."""
    from megatron_kd.models.checkpoint_tensors import CheckpointWeights
    from megatron_kd.models.parameters import places_in

    weights = CheckpointWeights(path)
    return [
        place.megatron_name
        for place, parameter in places_in(student.bare, model, groups)
        if not torch.equal(parameter, place.shard(place.whole(weights.read, model), model, groups))
    ]


def straight_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Trains on one rank, saves after some steps, goes on for two; also the second of them without moments."""
    from megatron_kd.training.checkpoint import load_checkpoint, save_checkpoint

    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        student, groups = student_of(folder / "recipe.yaml", model, str(folder / name), {})
        for _ in range(BEFORE):
            step(student, groups, model)
        path = save_checkpoint(student, model, groups, folder / f"{name}_one", keep=1)
        found[name] = {"unlike": unlike(student, groups, model, path)}
        found[name]["curve"] = [step(student, groups, model) for _ in range(2)]
        load_checkpoint(student, model, groups, path)
        for optimizer in student.optimizer.chained_optimizers:
            for moments in optimizer.optimizer.state.values():
                moments["exp_avg"].zero_()
        found[name]["forgetful"] = [step(student, groups, model) for _ in range(2)]
    return found


def changed_rank(
    rank: int, world: int, folder: Path, cases: list[tuple[str, dict[str, Any], str, str]]
) -> dict[str, dict[str, Any]]:
    """Loads in a layout what was saved elsewhere, saves it again from there, and goes on."""
    from megatron_kd.training.checkpoint import load_checkpoint, save_checkpoint

    found = {}
    for name, sizes, source, target in cases:
        model = MODELS[name]
        student, groups = student_of(folder / "recipe.yaml", model, str(folder / name), sizes)
        path = folder / source / "checkpoints" / f"iter_{BEFORE:07d}"
        load_checkpoint(student, model, groups, path)
        case = {"iteration": student.iteration, "unlike": unlike(student, groups, model, path)}
        if target:
            again = save_checkpoint(student, model, groups, folder / target, keep=1)
            case["unlike"] += unlike(student, groups, model, again)
        found[f"{name} {sizes} from {source}"] = {**case, "curve": [step(student, groups, model) for _ in range(2)]}
    return found


def words(world: int, sizes: dict[str, Any]) -> str:
    short = {TP: "tp", SP: "sp", PP: "pp", VP: "vp", CP: "cp", EP: "ep"}
    return layouts_table.short(Layout(world, **{short[key]: size for key, size in sizes.items()}))


def saved_as(name: str, sizes: dict[str, Any]) -> str:
    return "_".join([name, "dp" if not sizes else "", *(f"{axis[:8]}" for axis in sizes if axis != SP)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout_changes")
    for name, model in MODELS.items():
        random_hf_model(model).save_pretrained(folder / name)
    tiny_recipe(folder, training={"global_batch_size": ROWS})
    return folder


def test_a_run_goes_on_in_any_other_layout(folder: Path) -> None:
    """1 rank → 2 ranks in each layout → 4 ranks in pipelines of spread experts → 1 rank, from all of them."""
    straight = run_distributed(straight_rank, 1, folder)[0]
    two = [(name, sizes, f"{name}_one", saved_as(name, sizes)) for name in MODELS for sizes in TWO[name]]
    four = [
        ("gpt_oss", FOUR["gpt_oss"], saved_as("gpt_oss", {TP: 2}), saved_as("gpt_oss", FOUR["gpt_oss"])),
        ("llama", FOUR["llama"], saved_as("llama", {CP: 2}), saved_as("llama", FOUR["llama"])),
    ]
    one: list[Any] = [(name, {}, target, "") for name, _, _, target in [*two, *four]]
    places = {f"{name}_one": "1 rank" for name in MODELS}
    differences: dict[tuple[str, str], tuple[float, ...]] = {}
    for cases, ranks in ((two, 2), (four, 4), (one, 1)):
        everywhere = run_distributed(changed_rank, ranks, folder, cases, timeout_s=300.0)
        for number, (name, sizes, source, target) in enumerate(cases):
            places[target] = words(ranks, sizes)
            expected = np.array(straight[name]["curve"])
            worst = np.zeros(2)
            for found in everywhere:
                case, figures = list(found.items())[number]
                assert figures["unlike"] == [] and figures["iteration"] == BEFORE, case
                worst = np.maximum(worst, np.abs(np.array(figures["curve"]) / expected - 1).max(axis=0))
            differences[f"{places[source]} → {places[target]}", f"tiny_{name}"] = tuple(map(float, worst))
            assert worst.max() < 1e-5, differences
    layouts_table.write("resumed", differences)
    page = (ROOT / "docs/measurements.md").read_text()
    assert all(f"| {place} | {name} |" in page for place, name in differences), "python -m tests.layouts_table"
    for name, figures in straight.items():
        assert figures["unlike"] == []
        # Lost moments would show: in the second step's loss, ten times what is tolerated above.
        assert figures["forgetful"][0] == pytest.approx(figures["curve"][0], rel=1e-6), name
        assert abs(figures["forgetful"][1][0] - figures["curve"][1][0]) > 1e-4 * figures["curve"][1][0], name
