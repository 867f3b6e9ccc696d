"""GPU-hours and what they are counted to, against values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_kd.config import dump_recipe, load_recipe
from megatron_kd.report import read_run
from megatron_kd.report.curves import Clock, Curve, drawn_curves, heldout_curve, hours_to, thin, training_curve, window
from megatron_kd.report.runs import RunRecord
from megatron_kd.report.summary import hours_name, labels
from megatron_kd.report.target import comparability_notes, find_target
from tests.unit.report_runs import REPOSITORY, write_run

EVALUATIONS = ((0, 9.0), (1, 8.0), (2, 6.0), (4, 4.5))


def run_with(recipe: Path, rows: list[dict[str, float]]) -> RunRecord:
    """A run of a recipe with these lines of metrics."""
    recipe.mkdir(exist_ok=True)
    loaded = load_recipe(REPOSITORY / "recipes/smollm2_cpu_tp3.yaml", [])
    (recipe / "recipe.yaml").write_text(dump_recipe(loaded))
    (recipe / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(recipe)


def test_hours_are_step_times_of_all_ranks(tmp_path: Path) -> None:
    """Three ranks; log lines at 1, 3 and 6, between which the later time counts; no time at the evaluation in 0."""
    times = [(0, None), (1, 10.0), (3, 20.0), (6, 30.0)]
    rows = [
        {"iteration": step, "tokens": step, "loss/kd": 1.0, **({} if s is None else {"perf/step_time_s": s})}
        for step, s in times
    ]
    clock = Clock(run_with(tmp_path, rows))
    seconds = {0: 0.0, 1: 10.0, 2: 30.0, 3: 50.0, 6: 50.0 + 90.0}
    for step, expected in seconds.items():
        assert clock.hours_at(step) == pytest.approx(3 * expected / 3600)
    assert clock.total == pytest.approx(3 * 140 / 3600)
    assert clock.hours_at(7) is None


def test_without_times_there_are_no_hours(tmp_path: Path) -> None:
    run = run_with(tmp_path, [{"iteration": 1, "tokens": 3, "loss/kd": 1.0}])
    assert Clock(run).total is None
    assert training_curve(run).hours is None
    assert find_target([run]).hours == [None]


@pytest.mark.parametrize(
    ("target", "expected"),
    [(9.5, 0.0), (9.0, 0.0), (7.0, 1.5), (6.0, 2.0), (5.5, 2.0 + 2.0 / 3.0), (4.5, 4.0), (4.4, None)],
)
def test_hours_to_a_value_on_straight_lines(target: float, expected: float | None) -> None:
    curve = Curve([0, 1, 2, 4], [0.0, 1.0, 2.0, 4.0], [9.0, 8.0, 6.0, 4.5])
    assert hours_to(curve, target) == (None if expected is None else pytest.approx(expected))


def test_the_first_time_counts() -> None:
    assert hours_to(Curve([1, 2, 3], [1.0, 2.0, 3.0], [5.0, 3.0, 6.0]), 4.0) == pytest.approx(1.5)
    assert hours_to(Curve([], None, []), 4.0) is None


def test_target_of_heldout_evaluations(tmp_path: Path) -> None:
    """Steps take 2, 3, 4, 5 s. The slower run ends at 5.0, the highest final value; the other is there between steps 2
    and 4, at a third of the way from 6.0 to 4.5 it would be 5.5, at two thirds 5.0."""
    good = read_run(write_run(tmp_path / "good", evaluations=EVALUATIONS))
    poor = read_run(write_run(tmp_path / "poor", evaluations=((0, 9.0), (1, 8.0), (2, 7.0), (4, 5.0))))
    found = find_target([good, poor])
    assert (found.value, found.basis, found.final) == (5.0, "held-out evaluations", [4.5, 5.0])
    assert found.hours == [pytest.approx((5 + 9 * 2 / 3) / 3600), pytest.approx(14 / 3600)]
    asked = find_target([good, poor], 4.75)
    assert asked.value == 4.75 and asked.hours[1] is None
    assert comparability_notes([good, poor], ["a", "b"], asked) == ["b did not reach KL 4.75 (last: 5.00)"]
    assert hours_name([good, poor]) == "rank-hours"


def test_target_of_training_curves_where_evaluations_are_few(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", evaluations=EVALUATIONS))]
    found = find_target(runs)
    assert (found.value, found.basis) == (4.0, "training curve")
    assert found.hours == [pytest.approx(14 / 3600)] * 2


def test_divergences_of_different_kinds_have_no_common_target(tmp_path: Path) -> None:
    kl = read_run(write_run(tmp_path / "kl"))
    tvd = read_run(write_run(tmp_path / "tvd", "loss.divergence=tvd", kd=(0.8, 0.5, 0.4, 0.3)))
    found = find_target([kl, tvd])
    assert (found.value, found.hours) == (None, [None, None])
    (note,) = comparability_notes([kl, tvd], labels([kl, tvd]), found)
    assert "different divergences (forward_kl, tvd)" in note
    assert find_target([tvd]).goal == "TVD 0.300" and find_target([kl]).goal == "KL 4.00"


def test_targets_that_differ_are_noted(tmp_path: Path) -> None:
    def with_mass(name: str, mass: float, *overrides: str) -> RunRecord:
        run = write_run(tmp_path / name, *overrides, evaluations=EVALUATIONS)
        for path in (run / "evaluations").iterdir():
            row = {**json.loads(path.read_text()), "eval/tokens": 100.0, "eval/teacher_mass": mass}
            path.write_text(json.dumps(row))
        return read_run(run)

    wide, narrow = with_mass("wide", 0.9), with_mass("narrow", 0.8, "teacher.top_k=20")
    notes = comparability_notes([wide, narrow], ["a", "b"], find_target([wide, narrow]))
    assert [note.partition(" ")[0] for note in notes] == ["training", "held-out"]
    again = with_mass("again", 0.9)
    assert comparability_notes([wide, again], ["a", "b"], find_target([wide, again])) == []


def test_curves_for_pictures(tmp_path: Path) -> None:
    kd = tuple(8.0 + math.sin(step) for step in range(1000))
    drawn = drawn_curves(read_run(write_run(tmp_path / "a", kd=kd)))
    train = drawn["train"]
    assert len(train["tokens"]) == len(train["smoothed"]) == len(train["hours"]) == 600
    assert (train["tokens"][0], train["tokens"][-1]) == (480, 480_000)
    assert max(train["smoothed"][50:-50]) < 8.2 < max(train["kd"])
    assert drawn["heldout"]["kd"] == [9.0, 6.0, 4.5]
    assert heldout_curve(read_run(tmp_path / "a")).over("hours")[0] == 0.0


def test_windows_and_thinning() -> None:
    assert [window(points) for points in (1, 19, 39, 40, 66, 100, 2000)] == [1, 1, 1, 3, 3, 5, 101]
    assert thin(3, 5) == [0, 1, 2]
    assert thin(9, 3) == [0, 4, 8]
