"""GPT-OSS captured, and trained beside its teacher, with layers, experts and matrices spread over ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_kd.errors import RemoteRankError
from megatron_kd.testing import RankFailedError, run_distributed
from tests.assets import tiny_llama_folder, tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.training_runs import Layout, Trainer, leave_layout, make_inputs, recipe_in

ALONE = Layout(1)
OTHERS = [
    Layout(2, ep=2),
    Layout(2, tp=2, sp=True),
    Layout(2, pp=2),
    Layout(2, tp=2, sp=True, ep=2),
    Layout(4, pp=2, ep=2),
    Layout(4, tp=2, sp=True, pp=2, ep=2),
    Layout(2, cp=2, ep=2),
    Layout(4, pp=2, cp=2),
]
LOSSES = ("loss/kd", "loss/ce", "kd/teacher_mass", "kd/student_mass", "kd/tail", "optim/grad_norm", "tokens")
ROWS = 13
ONLINE = ("full", "top_k")
# What is new to an online teacher are stages and experts; its own stages are whole beside a student in chunks.
DENSE_STUDENT, IN_CHUNKS = Layout(2, ep=2), Layout(2, pp=2, vp=2)
WITH_TEACHER = [IN_CHUNKS, *(layout for layout in OTHERS if layout.tp == 1)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    # The student is another random model: what a step does is seen at its largest.
    teacher, student = (tiny_gpt_oss_folder(folder / f"hf_{seed}", seed) for seed in (12, 13))
    return tiny_recipe(
        folder,
        # Shards of 3 rows scored by twos: portions and ranks go short.
        data={"train_tokens": 48 * 8, "heldout_tokens": 48 * 5},
        teacher={
            "model": teacher.model_dump(mode="json"),
            "capture": {"rows_per_shard": 3, "micro_batch_size": 2, "value_dtype": "float32"},
        },
        student={
            "from_teacher": None,
            "model": student.model_dump(mode="json"),
            "checkpoint": str(folder / "student"),
        },
        loss={"ce_weight": 0.25},
        optimizer={"lr_warmup_iters": 0, "clip_grad": 0.5},
    )


def _captured(recipe: Path, layout: Layout, cache: Path) -> list[Any]:
    """The rows of a capture in a layout, as its first rank sees them."""
    import torch.distributed as dist

    from megatron_kd.cache.reader import CacheReader
    from megatron_kd.teacher.capture import capture

    leave_layout()
    report = capture(recipe_in(recipe, layout, f"teacher.cache={cache}"), show_progress=False)
    assert report.complete and report.rows_captured == ROWS
    rows = CacheReader(cache).read_many(range(ROWS)) if dist.get_rank() == 0 else []
    dist.barrier()
    return rows


def _dense_student(recipe: Path) -> list[str]:
    """The overrides that make a Llama the student."""
    return [
        "student.model=tiny_llama",
        f"student.model.hf={tiny_llama_folder()}",
        f"student.checkpoint={recipe.parent / 'dense'}",
    ]


def _look(recipe: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if layout in (ALONE, *OTHERS):
        found["rows"] = _captured(recipe, layout, folder / f"cache {layout}")
    if layout == ALONE:
        found["step"] = Trainer(recipe_in(recipe, layout)).step()
    for targets in ONLINE if layout in (ALONE, *WITH_TEACHER) else ():
        online = recipe_in(recipe, layout, "teacher.mode=online", f"teacher.targets={targets}")
        found[targets] = Trainer(online).step()
    if layout in (ALONE, DENSE_STUDENT):
        online = recipe_in(recipe, layout, "teacher.mode=online", "teacher.targets=top_k", *_dense_student(recipe))
        found["dense student"] = Trainer(online).step()
    return found


def _rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[Layout, dict[str, Any]]:
    if world == 1:
        from megatron_kd.models.convert import import_model

        make_inputs(recipe_in(recipe, ALONE), masked=True)
        import_model(recipe_in(recipe, ALONE), "student", show_progress=False)
        import_model(recipe_in(recipe, ALONE, *_dense_student(recipe)), "student", show_progress=False)
    return {layout: _look(recipe, layout, folder) for layout in (ALONE, IN_CHUNKS, *OTHERS) if layout.world == world}


@pytest.fixture(scope="module")
def found(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, list[dict[str, Any]]]:
    """What each rank reports, by layout."""
    folder = tmp_path_factory.mktemp("looked")
    every: dict[Layout, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        ranks: list[dict[Layout, dict[str, Any]]] = run_distributed(_rank, world, recipe, folder, timeout_s=300.0)
        every |= {layout: [rank[layout] for rank in ranks] for layout in ranks[0]}
    return every


def _dying_rank(rank: int, world: int, recipe: Path, folder: Path) -> None:
    """The last stage dies between two steps; the first one writes down what it makes of that."""
    trainer = Trainer(recipe_in(recipe, Layout(2, pp=2)))
    trainer.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RemoteRankError) as caught:
        trainer.step()
    (folder / "said").write_text(str(caught.value))


def _equal(ours: dict[str, float], theirs: dict[str, float], names: tuple[str, ...] = LOSSES) -> None:
    assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4)


@pytest.mark.parametrize("layout", WITH_TEACHER, ids=str)
@pytest.mark.parametrize("targets", ONLINE)
def test_an_online_step_is_the_same_in_every_layout(
    found: dict[Layout, list[dict[str, Any]]], targets: str, layout: Layout
) -> None:
    alone = found[ALONE][0][targets]
    if targets == "top_k":
        _equal(alone, found[ALONE][0]["step"])
    for rank in found[layout]:
        _equal(rank[targets], alone)


def test_a_stage_that_dies_ends_the_others_with_one_message(recipe: Path, found: object, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 died with exit code -9"):
        run_distributed(_dying_rank, 2, recipe, tmp_path)
    said = (tmp_path / "said").read_text()
    assert said.startswith("a rank of this job died or no longer answers") and said.count("look at its log") == 1


def test_a_student_without_experts_learns_beside_a_teacher_that_spreads_them(
    found: dict[Layout, list[dict[str, Any]]],
) -> None:
    for rank in found[DENSE_STUDENT]:
        _equal(rank["dense student"], found[ALONE][0]["dense student"])


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_every_layout_captures_the_same(found: dict[Layout, list[dict[str, Any]]], layout: Layout) -> None:
    for ours, theirs in zip(found[layout][0]["rows"], found[ALONE][0]["rows"], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours.tail_logmass, theirs.tail_logmass, rtol=0, atol=1e-4)
