"""What a step is counted as: by hand for one model, and beside the throughput that is published."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_kd.config import Recipe, load_model, load_recipe
from megatron_kd.models.flops import forward_flops_per_token, head_flops, layer_flops, training_flops_per_token
from megatron_kd.models.step_flops import step_flops
from megatron_kd.planning.published_results import EIGHT_TO_THREE, GPT_OSS, PublishedRun
from tests.assets import ROOT


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/bench_step.yaml", overrides)


def test_a_gpt_oss_by_hand() -> None:
    """Two experts of 40, 8 heads and 2 groups of 16, windows of 8 in every other layer, 512 positions."""
    model = load_model("tiny_gpt_oss", ROOT)
    sliding, full = layer_flops(model, 512)[:2]
    assert sliding.projections == full.projections == 2 * (48 * (128 + 2 * 32) + 128 * 48)
    assert sliding.feed_forward == full.feed_forward == 2 * 3 * 48 * 40 * 2
    assert full.attention == 2 * 2 * 128 * 256
    seen = sum(min(position + 1, 8) for position in range(512)) / 512  # its own position included
    assert sliding.attention == pytest.approx(2 * 2 * 128 * seen)
    assert head_flops(model) == 2 * 48 * 1003


def test_documents_of_packed_rows_see_themselves_alone() -> None:
    model = load_model("tiny_llama", ROOT)
    halves = forward_flops_per_token(model, 512, [256, 256])
    assert halves == forward_flops_per_token(model, 256)
    uneven = layer_flops(model, 512, [128, 384])[0].attention
    assert uneven == pytest.approx(4 * 64 * (128**2 + 384**2) / (2 * 512))


@pytest.mark.parametrize(
    ("overrides", "student_head", "teacher_head"),
    [
        ([], 3 * 700, 0),
        (["loss.mode=recompute"], 4 * 700, 0),
        (["loss.gradient_mib=0"], 4 * 700, 0),
        (["loss.implementation=dense"], 3 * 1024, 0),
        (["teacher.mode=online", "teacher.targets=full"], 3 * 700, 700),
        (["teacher.mode=online", "teacher.targets=full", "loss.mode=recompute"], 4 * 700, 2 * 700),
        (["teacher.mode=online", "teacher.targets=top_k"], 3 * 700, 1024),
    ],
)
def test_projections_of_a_loss(overrides: list[str], student_head: int, teacher_head: int) -> None:
    """1,024 positions, of which 700 train."""
    of = recipe(*overrides)
    flops, one = step_flops(of, 700), head_flops(of.student.model)
    assert (flops.student_head, flops.teacher_head) == (student_head * one, teacher_head * one)
    assert flops.student == 1024 * training_flops_per_token(of.student.model, 512)
    assert flops.executed - flops.student_head - flops.teacher_head == flops.student_body + flops.teacher_body
    assert flops.teacher_body + 1024 * one * bool(teacher_head) == flops.teacher


def _rows(run: PublishedRun, per_token: float, length: int) -> float:
    return run.tflops * 1e12 * run.gpus * run.seconds / per_token / length


def test_published_throughput_counts_the_student_alone() -> None:
    """One batch of 32 rows explains all four runs within 1 %, online as well, and no other count does."""
    student, teacher = load_model("llama32_3b", ROOT), load_model("llama31_8b", ROOT)
    ours = training_flops_per_token(student, 8192)
    assert [_rows(run, ours, 8192) for run in EIGHT_TO_THREE] == pytest.approx([32] * 4, rel=0.01)
    with_teacher = ours + forward_flops_per_token(teacher, 8192)
    assert _rows(EIGHT_TO_THREE[0], with_teacher, 8192) < 19
    whole_squares = ours + 3 * sum(layer.attention for layer in layer_flops(student, 8192))
    assert all(_rows(run, whole_squares, 8192) < 27.2 for run in EIGHT_TO_THREE)
    fourth = ours + head_flops(student)
    assert _rows(EIGHT_TO_THREE[3], fourth, 8192) == pytest.approx(30.9, abs=0.1)


def test_published_throughput_of_a_pruned_gpt_oss() -> None:
    """32 and 128 rows within 0.4 % with 13 full layers of 24; with alternating layers 3 % too many."""
    model = load_model("gpt_oss_20b", ROOT)
    sliding, full = layer_flops(model, 32768)[:2]
    alternating = training_flops_per_token(model, 32768)
    one_more = alternating + 3 * (full.attention - sliding.attention)
    rows: dict[str, list[Any]] = {
        name: [_rows(run, count, 32768) for run in GPT_OSS]
        for name, count in (("alternating", alternating), ("13 of 24", one_more))
    }
    assert rows["alternating"] == pytest.approx([128 * 1.028, 32 * 1.028], rel=0.001)
    assert rows["13 of 24"] == pytest.approx([128, 32], rel=0.004)
