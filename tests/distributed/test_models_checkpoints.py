"""Checkpoints of weights across world sizes: whole and cut for a student, other models, and damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_kd.config import ModelConfig
from megatron_kd.testing import run_distributed
from tests.distributed.test_models_parity import imported, join
from tests.models_oracles import grouped_model, random_hf_model

KEEP = [2, 0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The grouped Llama as Hugging Face and as Megatron-Core keep it: the second written by two ranks, TP 2."""
    folder = tmp_path_factory.mktemp("grouped")
    random_hf_model(grouped_model()).save_pretrained(folder / "hf")
    run_distributed(save_rank, 2, str(folder / "hf"), str(folder / "megatron"))
    return str(folder / "hf"), str(folder / "megatron")


def save_rank(rank: int, world: int, hf: str, path: str) -> None:
    """Imports at TP 2 and saves."""
    from megatron_kd.models.checkpoint import save_weights

    layout, groups = join(tensor_model_parallel_size=2, sequence_parallel=True)
    built = imported(grouped_model(), hf, layout, groups, trainable=False)
    save_weights(built, grouped_model(), Path(path), {"weights_sha256": "none"})


def loaded_rank(rank: int, world: int, hf: str, path: str) -> list[str]:
    """Parameters whose values are not exactly Hugging Face's, loaded whole and cut to chosen layers, in all layouts."""
    from megatron_kd.models.build import build_model
    from megatron_kd.models.checkpoint import load_weights
    from megatron_kd.models.checkpoint_tensors import CheckpointWeights
    from megatron_kd.models.cut import CutWeights
    from megatron_kd.models.load import load_hf_weights

    wrong = []
    for tp in [size for size in (1, 2) if world % size == 0]:
        layout, groups = join(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
        teacher = dict(imported(grouped_model(), hf, layout, groups, trainable=False).named_parameters())
        student_model = grouped_model().cut(KEEP)
        student = build_model(student_model, layout, groups, "fp32", trainable=True)
        view = CutWeights(CheckpointWeights(Path(path)), grouped_model(), student_model, KEEP)
        load_hf_weights(student, student_model, view, groups)
        for name, value in student.named_parameters():
            source = name
            for i, layer in enumerate(KEEP):
                if name.startswith(f"decoder.layers.{i}."):
                    source = name.replace(f"layers.{i}.", f"layers.{layer}.")
            if not torch.equal(value, teacher[source]):
                wrong.append(f"tp{tp} {name}")
        whole = build_model(grouped_model(), layout, groups, "fp32", trainable=False)
        load_weights(whole, grouped_model(), Path(path))
        wrong += [
            f"tp{tp} whole {name}" for name, value in whole.named_parameters() if not torch.equal(value, teacher[name])
        ]
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_come_back_exactly_whole_or_cut(world: int, saved: tuple[str, str]) -> None:
    assert run_distributed(loaded_rank, world, *saved) == [[]] * world


def _flip(path: Path) -> None:
    """One bit in the middle, as a disk or a copy over the network may turn one."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _forget_hashes(path: Path, zeros: str) -> None:
    note = json.loads((path / "model.json").read_text())
    del note["xxh3_128"]
    del note["files"]
    (path / "model.json").write_text(json.dumps(note))
    (path / zeros).write_bytes(bytes((path / zeros).stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no checkpoint at"),
    "no note": (lambda path: (path / "model.json").unlink(), "has no model.json"),
    "half a note": (lambda path: _truncate(path / "model.json"), "model.json is damaged"),
    "a note of another kind": (lambda path: (path / "model.json").write_text("[1]"), "model.json is damaged"),
    "a note without a model": (lambda path: (path / "model.json").write_text("{}"), "model.json is damaged"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "half the metadata": (lambda path: _truncate(path / ".metadata"), ".metadata has"),
    "metadata of garbage": (lambda path: (path / ".metadata").write_bytes(b"garbage"), ".metadata has 7 bytes of"),
    "empty metadata": (lambda path: (path / ".metadata").write_bytes(b""), ".metadata has 0 bytes of"),
    "no format": (lambda path: (path / "metadata.json").unlink(), "has no metadata.json"),
    "half a format": (lambda path: _truncate(path / "metadata.json"), "metadata.json is unreadable"),
    "one file missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "half of one file": (lambda path: _truncate(path / "__0_0.distcp"), "__0_0.distcp has"),
    "one file empty": (lambda path: (path / "__1_0.distcp").write_bytes(b""), "__1_0.distcp has 0 bytes of"),
    "one file of zeros": (
        lambda path: (path / "__1_0.distcp").write_bytes(bytes((path / "__1_0.distcp").stat().st_size)),
        "__1_0.distcp does not hold what was written",
    ),
    "a bit of one file": (lambda path: _flip(path / "__0_0.distcp"), "__0_0.distcp does not hold what was written"),
    "a bit of the metadata": (lambda path: _flip(path / ".metadata"), ".metadata does not hold what was written"),
    "garbage without hashes": (lambda path: _forget_hashes(path, zeros=".metadata"), ".metadata is unreadable"),
    # As checkpoints of earlier versions are: without hashes the damage shows while loading.
    "zeros without hashes": (lambda path: _forget_hashes(path, zeros="__1_0.distcp"), "is damaged or of another model"),
}
ALONE = ["one file of zeros", "a bit of one file", "zeros without hashes"]
OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": ({"hidden_size": 64}, "hidden_size 48"),
    "deeper": ({"num_layers": 4}, "num_layers 3"),
    "another vocabulary": ({"vocab_size": 330}, "vocab_size 331"),
    "tied": ({"untie_embeddings_and_output_weights": False}, "untie_embeddings_and_output_weights True"),
    "another base": ({"rotary_base": 701.0}, "rotary_base 700.0"),
    "fewer groups": ({"num_query_groups": 2}, "num_query_groups 4"),
}


def refusals_rank(rank: int, world: int, path: str, cases: list[str]) -> dict[str, tuple[str, str]]:
    """The error of loading each damaged copy, and this one for other models: its type and message."""
    from megatron_kd.models.build import build_model
    from megatron_kd.models.checkpoint import load_weights

    layout, groups = join(tensor_model_parallel_size=2, sequence_parallel=False)
    errors = {}

    def attempt(case: str, model: ModelConfig, folder: Path) -> None:
        built = build_model(model, layout, groups, "fp32", trainable=False)
        try:
            load_weights(built, model, folder)
            errors[case] = ("loaded", "")
        except Exception as error:
            errors[case] = (type(error).__name__, str(error))
        dist.barrier()

    for case in cases:
        attempt(case, grouped_model(), Path(path) / case)
    for case, (changes, _) in OTHER_MODELS.items():
        attempt(case, grouped_model(**changes), Path(path) / "good")
    return errors


def test_damaged_checkpoints_are_refused_on_every_rank(saved: tuple[str, str], tmp_path: Path) -> None:
    shutil.copytree(saved[1], tmp_path / "good")
    for case, (damage, _) in DAMAGE.items():
        shutil.copytree(saved[1], tmp_path / case)
        damage(tmp_path / case)
    ranks = run_distributed(refusals_rank, 2, str(tmp_path), list(DAMAGE))
    expected = {case: needed for case, (_, needed) in (DAMAGE | OTHER_MODELS).items()}
    for case, needed in expected.items():
        kinds = [errors[case][0] for errors in ranks]
        error = "DamagedCheckpointError" if case in DAMAGE and case != "no folder" else "CheckpointError"
        assert error in kinds and set(kinds) <= {error, "RemoteRankError"}, (case, kinds)
        for kind, message in (errors[case] for errors in ranks):
            assert "\n" not in message and len(message) < 400, (case, message)
            assert needed in message or kind == "RemoteRankError", (case, message)
    # Only what lies in one rank's part of the data may be known to that rank alone.
    alone = [case for case in expected if any(errors[case][0] == "RemoteRankError" for errors in ranks)]
    assert sorted(alone) == sorted(ALONE)


def test_the_saved_note_says_what_model_it_is(saved: tuple[str, str]) -> None:
    note = json.loads((Path(saved[1]) / "model.json").read_text())
    assert ModelConfig.model_validate(note["architecture"]) == grouped_model()
