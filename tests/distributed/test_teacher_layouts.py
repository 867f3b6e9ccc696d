"""An online teacher in a layout of its own, or with its weights in the host's memory, teaches the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.training_runs import Layout, Trainer, make_inputs, recipe_in

SEQ = 64
KINDS = ("llama", "gpt_oss")
TARGETS = ("full", "top_k")
NAMES = ("loss/kd", "loss/ce", "kd/teacher_mass", "kd/student_mass", "optim/grad_norm", "tokens")
ALONE = Layout(1)


@dataclass(frozen=True)
class Case:
    """One model in two layouts."""

    kind: str
    student: Layout
    teacher: Layout
    batch: int = 4

    def __str__(self) -> str:
        return f"{self.kind}: student {self.student}; teacher {self.teacher}; {self.batch} rows"


CASES = [
    Case("llama", Layout(2, tp=2, sp=True), Layout(2)),
    Case("llama", Layout(2, micro=2), Layout(2, tp=2)),
    Case("gpt_oss", Layout(2, pp=2), Layout(2, ep=2)),
    Case("gpt_oss", Layout(2, cp=2, micro=2), Layout(2, tp=2, sp=True)),
    Case("gpt_oss", Layout(4, tp=2, sp=True), Layout(4, pp=2, ep=2)),
    # The fourth of the teacher's data-parallel ranks has no row.
    Case("gpt_oss", Layout(4, tp=2, sp=True, pp=2), Layout(4, ep=4), batch=3),
    Case("llama", Layout(4, pp=2, cp=2), Layout(4, tp=2, sp=True, cp=2)),
]


def _recipe(folder: Path, kind: str) -> Path:
    """A recipe whose rows begin with masked tokens. GPT-OSS has packed documents, and another model as student."""
    sections: dict[str, Any] = {
        "data": {"seq_length": SEQ, "train_tokens": 8 * SEQ, "heldout_tokens": 3 * SEQ},
        "teacher": {"capture": {"value_dtype": "float32", "rows_per_shard": 3}},
        "loss": {"ce_weight": 0.25},
    }
    if kind == "gpt_oss":
        words = ["An", "expression", "is", "a", "statement"]
        texts = [" ".join(words[(i * j + j) % 5] for j in range(3 + i % 11)) for i in range(99)]
        folder.mkdir()
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sections["data"] |= {
            "packing": "documents",
            "heldout_tokens": None,
            "corpus": {"format": "jsonl", "paths": [str(folder / "texts.jsonl")]},
        }
        teacher, student = (tiny_gpt_oss_folder(folder / f"hf_{seed}", seed) for seed in (12, 13))
        sections["teacher"]["model"] = teacher.model_dump(mode="json")
        sections["student"] = {
            "from_teacher": None,
            "model": student.model_dump(mode="json"),
            "checkpoint": str(folder / "student"),
        }
    return tiny_recipe(folder, **sections)


def _own(layout: Layout) -> list[str]:
    """The overrides that give the teacher a layout."""
    return [
        word.replace("parallelism.", "teacher.parallelism.") for word in layout.overrides() if "parallelism." in word
    ]


def _step(recipe: Path, layout: Layout, *overrides: str) -> dict[str, float]:
    return Trainer(recipe_in(recipe, layout, *overrides)).step()


def _online(targets: str) -> list[str]:
    return ["teacher.mode=online", f"teacher.targets={targets}"]


def _rank(rank: int, world: int, recipes: dict[str, Path]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if world == 1:
        from megatron_kd.models.convert import import_model

        for kind, recipe in recipes.items():
            make_inputs(recipe_in(recipe, ALONE))
            if kind == "gpt_oss":
                import_model(recipe_in(recipe, ALONE), "student", show_progress=False)
    for case in CASES:
        if case.student.world != world:
            continue
        recipe, batch = recipes[case.kind], f"training.global_batch_size={case.batch}"
        for targets in TARGETS:
            shared = [*_online(targets), batch]
            found[case, targets, "shared"] = _step(recipe, case.student, *shared)
            found[case, targets, "own"] = _step(recipe, case.student, *shared, *_own(case.teacher))
        found[case, "offline"] = _step(recipe, case.student, batch)
    return found


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teacher_layouts")
    return {kind: _recipe(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def found(recipes: dict[str, Path]) -> dict[Any, list[Any]]:
    """What each rank reports."""
    every: dict[Any, list[Any]] = {}
    for world in (1, 2, 4):
        ranks = run_distributed(_rank, world, recipes, timeout_s=300.0)
        every |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return every


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_teacher_in_its_own_layout_teaches_the_same(found: dict[Any, list[Any]], case: Case, targets: str) -> None:
    for own, shared in zip(found[case, targets, "own"], found[case, targets, "shared"], strict=True):
        assert {name: own[name] for name in NAMES} == pytest.approx({name: shared[name] for name in NAMES}, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_says_what_was_captured(found: dict[Any, list[Any]], case: Case) -> None:
    for own, offline in zip(found[case, "top_k", "own"], found[case, "offline"], strict=True):
        assert {name: own[name] for name in NAMES} == pytest.approx({name: offline[name] for name in NAMES}, rel=1e-5)
