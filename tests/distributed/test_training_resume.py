"""Damaged checkpoints of a run: refused by name, or skipped where the recipe says so, by all ranks alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from megatron_kd.config import load_model
from megatron_kd.errors import KDError
from megatron_kd.testing import run_distributed
from tests.assets import ROOT, tiny_recipe
from tests.distributed.test_training_layout_changes import step, student_of
from tests.models_oracles import random_hf_model

MODEL = load_model("tiny_llama", ROOT)


def damaged_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Saves three checkpoints, damages the two newest in ways that one rank alone sees, and goes on."""
    from megatron_kd.training.checkpoint import save_checkpoint
    from megatron_kd.training.resume import load_newest_checkpoint, newest_checkpoint

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_kd.training.resume").addHandler(handler)
    run_dir = folder / "run"
    student, groups = student_of(folder / "recipe.yaml", MODEL, str(folder / "hf"), {})
    weights, curve = {}, {}
    for iteration in range(1, 5):
        curve[iteration] = step(student, groups, MODEL)
        save_checkpoint(student, MODEL, groups, run_dir, keep=3)
        weights[iteration] = [parameter.detach().clone() for parameter in student.model.module.parameters()]
    torch.distributed.barrier()  # the first rank removes old ones
    found: dict[str, Any] = {"kept": sorted(path.name for path in (run_dir / "checkpoints").iterdir())}

    def attempt(on_damage: Any) -> str:
        try:
            return load_newest_checkpoint(student, MODEL, groups, run_dir, on_damage).name
        except KDError as error:
            return f"{type(error).__name__}: {error}"

    torch.distributed.barrier()
    if rank == 0:
        # Of the two ranks the second compares the later half of all files, sorted by name.
        flip(max((run_dir / "checkpoints/iter_0000004").glob("*.distcp")))
        (run_dir / "checkpoints/iter_0000003/.metadata").unlink()
    torch.distributed.barrier()
    found["refused"] = attempt("refuse")
    found["left"] = newest_checkpoint(run_dir).name  # type: ignore[union-attr]
    found["previous"] = attempt("previous")
    found["warnings"] = list(told)
    found["same"] = [torch.equal(a, b) for a, b in zip(student.model.module.parameters(), weights[2], strict=True)]
    found["iteration"] = student.iteration
    found["again"] = step(student, groups, MODEL), curve[3]
    found["saved"] = save_checkpoint(student, MODEL, groups, run_dir, keep=3).name
    found["left then"] = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    torch.distributed.barrier()
    if rank == 0:
        for path in (run_dir / "checkpoints").glob("iter_*/progress.json"):
            path.write_text("{")
    torch.distributed.barrier()
    found["none"] = attempt("previous")
    found["left at last"] = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    return found


def flip(path: Path) -> None:
    """Turns one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_is_refused_or_skipped_by_all_ranks_alike(tmp_path: Path) -> None:
    random_hf_model(MODEL).save_pretrained(tmp_path / "hf")
    tiny_recipe(tmp_path, training={"global_batch_size": 4})
    first, second = run_distributed(damaged_rank, 2, tmp_path)
    names = [f"iter_{iteration:07d}" for iteration in (2, 3, 4)]
    for found in (first, second):
        assert found["kept"] == names
        assert found["left"] == names[-1], "refusing changes nothing"
        assert found["previous"] == names[0] and found["iteration"] == 2
        assert all(found["same"]) and len(found["same"]) > 20
        again, expected = found["again"]
        assert again == expected
        assert found["saved"] == names[1]
        assert found["left then"] == [*names[:2], f"{names[1]}.damaged", f"{names[2]}.damaged"]
        assert found["left at last"] == found["left then"], "what nobody may go on from stays as it is"
    assert first["refused"].startswith("RemoteRankError")
    assert (
        second["refused"].startswith("DamagedCheckpointError")
        and "checkpoint.on_damage to previous" in second["refused"]
    )
    for found in (first, second):
        newest, before = found["warnings"][:2]
        assert f"{names[2]} is damaged" in newest and "does not hold what was written" in newest
        assert f"{names[1]} is damaged" in before and ".metadata" in before
        assert "none is whole" in found["none"] and "progress.json" in found["none"]
    assert [f"{name}.damaged" in line for name, line in zip(names[1:], first["warnings"][2:], strict=True)] == [
        True,
        True,
    ]
