"""An online teacher in a layout of its own, or with its weights in the host's memory, teaches the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_kd.config import Recipe
from megatron_kd.planning import layout as planning
from megatron_kd.planning.teacher import teacher_memory
from megatron_kd.testing import run_distributed
from tests.assets import tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.training_runs import Layout, Trainer, leave_layout, make_inputs, recipe_in

SEQ = 64
KINDS = ("llama", "gpt_oss")
TARGETS = ("full", "top_k")
OFFLOAD = "teacher.offload=true"
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
    # The second of the teacher's data-parallel ranks has one row, filled up to two.
    Case("gpt_oss", Layout(4, tp=2, sp=True, pp=2), Layout(4, cp=2, ep=2), batch=3),
]
EVALUATED, CAPTURED = CASES[0], CASES[1]
OFFLOADED = [CASES[3]]


def _recipe(folder: Path, kind: str) -> Path:
    """A recipe whose rows begin with masked tokens. GPT-OSS has packed documents, and another model as student."""
    draw = np.random.default_rng(5)
    words = [
        "An",
        "expression",
        "is",
        "a",
        "statement",
        "that",
        "names",
        "each",
        "value",
        "once",
        "more",
        "in",
        "order",
    ]
    texts = [" ".join(draw.choice(words, 4 + i % 17)) for i in range(99)]
    folder.mkdir()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sections: dict[str, Any] = {
        "data": {
            "packing": "documents" if kind == "gpt_oss" else "concatenate",
            "seq_length": SEQ,
            "train_tokens": 8 * SEQ,
            "heldout_tokens": 3 * SEQ,
            "corpus": {"format": "jsonl", "paths": [str(folder / "texts.jsonl")]},
        },
        "teacher": {"capture": {"value_dtype": "float32", "rows_per_shard": 3}},
        "loss": {"ce_weight": 0.25},
    }
    if kind == "gpt_oss":
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


def _online(targets: str, *more: str) -> list[str]:
    return ["teacher.mode=online", f"teacher.targets={targets}", *more]


@dataclass
class Passed:
    """One pass of a student over a step's rows, taught in some way.

    Attributes:
        sums: of the micro batches, on the last stage.
        gradients: of this rank's part of the student, summed over ranks.
        held: bytes of the teacher's weights on the device while the student's pass ran.
        planned: what the plan says of them for the fullest rank.
    """

    sums: torch.Tensor
    gradients: dict[str, np.ndarray[Any, Any]]
    held: int
    planned: float
    evaluation: dict[str, float] | None = None


def _passed(trainer: Trainer, recipe: Recipe, *, evaluates: bool = False) -> Passed:
    """A pass with the gradients of a recipe's first step, taught as the recipe says; nothing is updated. Collective."""
    from megatron_kd.teacher.online import OnlineTeacher
    from megatron_kd.training.distill import Distillation
    from megatron_kd.training.evaluate import evaluate_model
    from megatron_kd.training.loop import step_reader

    session, model = trainer.session, trainer.student.model
    teacher = OnlineTeacher(recipe, session.groups) if recipe.teacher.mode == "online" else None
    distillation = Distillation(recipe, session.groups, teacher)
    seen: list[int] = []

    def weigh(*_: Any) -> None:
        if teacher is not None:
            seen.append(sum(p.untyped_storage().nbytes() for p in teacher.engine.model.parameters()))
            seen[-1] += 0 if teacher._head is None else teacher._head.nbytes

    handle = model.register_forward_pre_hook(weigh)
    model.zero_grad_buffer()
    sums = distillation.run(model, step_reader(session)(0), seq_length=SEQ, forward_only=False)
    handle.remove()
    gradients = trainer.gradients()
    evaluation = None
    if evaluates:
        evaluation = evaluate_model(model.module, distillation, session.samples, None, session.groups, 1)
    total = torch.stack(sums) if sums else torch.zeros(0)
    layout = planning.Layout.of(recipe)
    planned = max(teacher_memory(recipe, layout, stage).kept for stage in range(layout.pp))
    return Passed(total, gradients, max(seen, default=0), planned, evaluation)


def _case(recipe: Path, case: Case) -> dict[Any, Passed]:
    """Passes of one student: taught by the cache, by a teacher in its layout, in another, from the host."""
    batch = f"training.global_batch_size={case.batch}"
    trainer = Trainer(recipe_in(recipe, case.student, batch))

    def passed(*overrides: str) -> Passed:
        loaded = recipe_in(recipe, case.student, batch, *overrides)
        evaluates = case == EVALUATED and loaded.teacher.mode == "online" and loaded.teacher.targets == "top_k"
        return _passed(trainer, loaded, evaluates=evaluates)

    found: dict[Any, Passed] = {"offline": passed()}
    for targets in TARGETS:
        found[targets, "shared"] = passed(*_online(targets))
        found[targets, "own"] = passed(*_online(targets), *_own(case.teacher))
        if case in OFFLOADED:
            found[targets, "shared", "offload"] = passed(*_online(targets, OFFLOAD))
            found[targets, "own", "offload"] = passed(*_online(targets, OFFLOAD), *_own(case.teacher))
    return found


def _captured(recipe: Path, case: Case) -> list[Any]:
    """Rows captured with the teacher in its own layout beside those that one rank captured; nothing but on rank 0."""
    from megatron_kd.cache.reader import CacheReader
    from megatron_kd.teacher.capture import capture

    leave_layout()
    loaded = recipe_in(recipe, case.student, f"teacher.cache={recipe.parent / 'own'}", *_own(case.teacher))
    assert capture(loaded, show_progress=False).complete
    caches = [CacheReader(Path(name)).read_many(range(8)) for name in (recipe.parent / "cache", recipe.parent / "own")]
    return list(zip(*caches, strict=True)) if dist.get_rank() == 0 else []


def _rank(rank: int, world: int, recipes: dict[str, Path]) -> dict[Any, Any]:
    if world == 1:
        from megatron_kd.models.convert import import_model

        for kind, recipe in recipes.items():
            make_inputs(recipe_in(recipe, ALONE))
            if kind == "gpt_oss":
                import_model(recipe_in(recipe, ALONE), "student", show_progress=False)
    found: dict[Any, Any] = {case: _case(recipes[case.kind], case) for case in CASES if case.student.world == world}
    if world == CAPTURED.student.world:
        found["captured"] = _captured(recipes[CAPTURED.kind], CAPTURED)
    import sys
    import time

    print("CPU", world, rank, time.process_time(), file=sys.stderr)
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


def _equal(ours: Passed, theirs: Passed, tolerance: float) -> None:
    """The sums and the gradient within a relative tolerance: its norm, and each parameter's by its largest."""
    assert ours.sums.tolist() == [pytest.approx(row, rel=tolerance, abs=1e-12) for row in theirs.sums.tolist()]
    norms = [
        sum(float((gradient**2).sum()) for gradient in passed.gradients.values()) ** 0.5 for passed in (ours, theirs)
    ]
    assert norms[1] > 0.01 and norms[0] == pytest.approx(norms[1], rel=tolerance)
    for name, exact in theirs.gradients.items():
        scale = max(float(np.abs(exact).max()), 1e-3 * norms[1])
        assert float(np.abs(ours.gradients[name] - exact).max()) <= 10 * tolerance * scale, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_teacher_in_its_own_layout_teaches_the_same(found: dict[Any, list[Any]], case: Case) -> None:
    for rank in found[case]:
        for targets in TARGETS:
            _equal(rank[targets, "own"], rank[targets, "shared"], 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_says_what_was_captured(found: dict[Any, list[Any]], case: Case) -> None:
    for rank in found[case]:
        _equal(rank["top_k", "own"], rank["offline"], 1e-5)
    assert sum(len(rank["offline"].sums) for rank in found[case]) > 0


@pytest.mark.parametrize("layout", ["shared", "own"])
@pytest.mark.parametrize("case", OFFLOADED, ids=str)
def test_offloaded_weights_are_gone_in_the_students_pass_and_change_no_bit(
    found: dict[Any, list[Any]], case: Case, layout: str
) -> None:
    for rank in found[case]:
        for targets in TARGETS:
            there, gone = rank[targets, layout], rank[targets, layout, "offload"]
            assert torch.equal(there.sums, gone.sums)
            assert all(np.array_equal(there.gradients[name], gone.gradients[name]) for name in there.gradients)
            # What stays is the head that the loss of whole distributions needs.
            assert gone.held < 0.3 * there.held and (gone.held > 0) == (targets == "full")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_weights_on_a_device_are_those_of_the_plan(found: dict[Any, list[Any]], case: Case) -> None:
    for taught in found[case][0]:
        assert max(rank[taught].held for rank in found[case]) == found[case][0][taught].planned, taught


def test_evaluations_are_equal(found: dict[Any, list[Any]]) -> None:
    for rank in found[EVALUATED]:
        shared = rank["top_k", "shared"].evaluation
        assert shared["eval/kd"] > 0.01
        assert rank["top_k", "own"].evaluation == pytest.approx(shared, rel=1e-5)


def test_a_capture_runs_in_the_teachers_own_layout(found: dict[Any, list[Any]]) -> None:
    (pairs,) = (rank for rank in found["captured"] if rank)
    for alone, own in pairs:
        np.testing.assert_array_equal(own.ids, alone.ids)
        np.testing.assert_allclose(own.logprobs, alone.logprobs, rtol=0, atol=1e-4)
