"""The routers' mass in every layout against Hugging Face's routers, and students of the experts with most of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.config import Recipe, load_recipe
from megatron_kd.data.packing import PackedRow
from megatron_kd.data.sample_writer import write_samples
from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.distributed.test_models_parity import CP, EP, PP, SP, TP, imported, join
from tests.models_oracles import random_hf_model, tiny_gpt_oss

MODEL = tiny_gpt_oss()
# Three rows over two data-parallel ranks: one of them runs a row that does not count.
LAYOUTS: list[dict[str, Any]] = [{}, {TP: 2, SP: True}, {PP: 2}, {CP: 2}, {EP: 2}]
ROWS, SEQ, LEFT = 3, 20, 2


def rows_of(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(4).integers(0, MODEL.vocab_size, (count, SEQ), dtype=np.int32)


def mass_by_hugging_face(hf: Any) -> torch.Tensor:
    """float64 [layers, experts] over the first rows, from what its router modules give."""
    mass = torch.zeros(MODEL.num_layers, MODEL.num_moe_experts or 0, dtype=torch.float64)

    def hook(layer: int) -> Any:
        def add(_module: Any, _inputs: Any, output: Any) -> None:
            _logits, chosen, experts = output
            for weights, indices in zip(chosen, experts, strict=True):
                for weight, index in zip(weights.tolist(), indices.tolist(), strict=True):
                    mass[layer, index] += weight

        return add

    for i, layer in enumerate(hf.model.layers):
        layer.mlp.router.register_forward_hook(hook(i))
    with torch.no_grad():
        hf(torch.tensor(rows_of(ROWS), dtype=torch.int64))
    return mass


def mass_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The mass in every layout, then the parameters of students that are cut by it, and what is kept of it."""
    from megatron_kd.models.checkpoint import save_weights
    from megatron_kd.models.cut import CutWeights
    from megatron_kd.models.hf_source import open_hf_weights
    from megatron_kd.models.parameters import places_in
    from megatron_kd.models.router_mass import router_mass
    from megatron_kd.training.setup import build_student

    found: dict[str, Any] = {}
    rows = torch.tensor(rows_of(ROWS), dtype=torch.int64)
    for sizes in LAYOUTS:
        layout, groups = join(**sizes)
        built = imported(MODEL, str(folder / "hf"), layout, groups, trainable=False)
        found[str(sizes)] = router_mass(built, MODEL, groups, rows)
    save_weights(built, MODEL, folder / "teacher", {"weights_sha256": "of the teacher"})
    kept = folder / "run" / "router_mass.json"

    def wrong(recipe: Recipe, experts: list[list[int]]) -> list[str]:
        """Builds the student; its parameters that are not those of the teacher's experts."""
        student = build_student(recipe, groups)
        model = recipe.student.model
        view = CutWeights(open_hf_weights(str(folder / "hf")), MODEL, model, range(MODEL.num_layers), experts)
        return [
            place.megatron_name
            for place, parameter in places_in(student, model, groups)
            if not torch.equal(parameter, place.shard(place.whole(view.read, model), model, groups))
        ]

    recipe = load_recipe(folder / "recipe.yaml")
    recipe = recipe.model_copy(update={"parallelism": layout})
    most = [sorted(row.argsort(descending=True)[:LEFT].tolist()) for row in found["{}"]]
    assert most != [[1, 3]] * MODEL.num_layers
    found["cut"] = wrong(recipe, most)
    torch.distributed.barrier()
    found["kept"] = json.loads(kept.read_text())
    # What was measured before is taken up; what was measured on other rows is not.
    other = [[0.0, 2.0, 0.0, 1.0]] * MODEL.num_layers
    torch.distributed.barrier()
    if rank == 0:
        kept.write_text(json.dumps({**found["kept"], "mass": other}))
    torch.distributed.barrier()
    found["taken up"] = wrong(recipe, [[1, 3]] * MODEL.num_layers)
    if rank == 0:
        kept.write_text(json.dumps({**found["kept"], "calibration_samples": 2, "mass": other}))
    torch.distributed.barrier()
    found["measured again"] = wrong(recipe, most)
    return found


def test_the_experts_with_most_mass_are_kept(tmp_path: Path) -> None:
    hf = random_hf_model(MODEL)
    hf.save_pretrained(tmp_path / "hf")
    rows = (PackedRow(row, np.ones(SEQ, np.uint8), np.array([0], np.int32)) for row in rows_of(ROWS + 2))
    write_samples(
        tmp_path / "samples",
        {"train": rows},
        seq_length=SEQ,
        packing="concatenate",
        tokenizer_identity={"vocab_size": MODEL.vocab_size},
        corpus_identity={},
        selection={},
    )
    teacher = {"model": MODEL.model_dump(mode="json"), "checkpoint": str(tmp_path / "teacher")}
    cut = {"keep_layers": None, "num_moe_experts": LEFT, "calibration_samples": ROWS}
    tiny_recipe(
        tmp_path,
        teacher=teacher,
        student={"from_teacher": cut},
        data={"seq_length": SEQ, "train_tokens": None, "heldout_tokens": None},
    )
    expected = mass_by_hugging_face(hf)
    assert expected.sum(dim=1) == pytest.approx(ROWS * SEQ, rel=1e-5)
    ranks = run_distributed(mass_rank, 2, tmp_path, timeout_s=240.0)
    for found in ranks:
        for sizes in LAYOUTS:
            assert torch.allclose(found[str(sizes)], expected, rtol=1e-4, atol=1e-4), sizes
        assert found["cut"] == found["taken up"] == found["measured again"] == []
        assert found["kept"]["calibration_samples"] == ROWS and found["kept"]["weights_sha256"] == "of the teacher"
        assert torch.allclose(torch.tensor(found["kept"]["mass"], dtype=torch.float64), expected, rtol=1e-4, atol=1e-4)
