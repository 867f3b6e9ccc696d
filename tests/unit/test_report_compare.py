"""From run directories to the figures, the table and the picture; broken and half-written runs too."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from rich.console import Console

from megatron_kd.errors import ConfigError, KDError
from megatron_kd.report import compare, read_run
from megatron_kd.report.curves import moving_average
from megatron_kd.report.figure import comparison_figure
from megatron_kd.report.summary import labels, summarize
from megatron_kd.report.table import rows
from megatron_kd.report.target import find_target
from megatron_kd.report.text import figure, hours_beside, seconds
from tests.unit.report_runs import REPOSITORY, write_run


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def printed(comparison: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(comparison.table())
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_figures_of_a_run(tmp_path: Path) -> None:
    run = summarize(read_run(write_run(tmp_path / "a")), "a")
    assert (run.method, run.targets, run.layout) == ("offline fused", "top 100", "1 × cpu")
    assert (run.iterations, run.tokens) == (4, 1920)
    assert run.step_time_s == pytest.approx((3.0 + 4.0) / 2)  # the median of 2, 3, 4, 5
    assert run.tokens_per_s == pytest.approx(250.0)
    assert run.peak_memory_gib == pytest.approx(1.9)
    assert (run.train_kd_first, run.train_kd_last) == (8.0, 4.0)
    assert (run.heldout_kd_before, run.heldout_kd_after, run.heldout_kd_factor) == (9.0, 4.5, 2.0)
    assert run.unigram_kd == 5.0
    assert (run.agreement_before, run.agreement_after) == (0.0, pytest.approx(0.4))
    assert (run.tflops_per_gpu, run.cache_wait_s) == (None, None)


def test_where_a_step_goes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"time/data_s": 0.001, "time/forward_backward_s": 0.7, "time/optimizer_s": 0.3}
        line |= {"perf/mfu": 0.4, "perf/hfu": 0.5}
    lines.append({"iteration": 4, "tokens": 1920, "time/checkpoint_s": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare([folder, write_run(tmp_path / "b")], tmp_path / "out")
    new, old = found.runs
    assert new.step_parts_s == {"data": 0.001, "forward_backward": 0.7, "optimizer": 0.3}
    assert (new.mfu, new.hfu, new.step_time_s) == (0.4, 0.5, pytest.approx(3.5))
    assert (old.step_parts_s, old.mfu, old.hfu) == ({}, None, None)
    cells = {title.strip(): (show(new), show(old)) for title, show in rows(found.runs, found.target, "rank-hours")}
    assert cells["where it goes"] == ("forward + backward 70%, optimizer 30%", "–")
    assert cells["MFU, HFU"] == ("40.0%, 50.0%", "–")
    assert "Where a step goes" in (tmp_path / "out" / "compare.html").read_text()


def test_layout_and_throughput_of_several_ranks(tmp_path: Path) -> None:
    run = summarize(read_run(write_run(tmp_path / "a", recipe="smollm2_cpu_tp3")), "a")
    assert run.layout == "3 × cpu, TP 3 + SP"
    assert run.tokens_per_s == pytest.approx(750.0)
    wide = write_run(
        tmp_path / "b", "cluster.gpus_per_node=2", "training.global_batch_size=2", recipe="smollm2_cpu_online"
    )
    assert summarize(read_run(wide), "b").layout == "2 × cpu, DP 2"
    assert summarize(read_run(wide), "b").targets == "full distribution"


def test_comparison_of_two_runs(tmp_path: Path) -> None:
    online = write_run(tmp_path / "online", recipe="smollm2_cpu_online")
    offline = write_run(tmp_path / "offline", "training.train_iters=70")
    found = compare([online, offline], tmp_path / "out")
    assert [run.label for run in found.runs] == ["online fused", "offline fused"]
    (note,) = found.notes
    assert "a KL over the top K and one bucket is a lower bound of the whole one" in note
    assert dict(found.differences)["training.train_iters"][1] == 70
    assert dict(found.differences)["teacher.mode"] == ["online", "offline"]
    assert not {"name", "run_dir"} & dict(found.differences).keys()
    assert found.figure == tmp_path / "out" / "compare.png"
    assert imread(found.figure).shape[1] > 1000
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["runs"][1]["heldout_kd_after"] == 4.5
    assert {"key": "teacher.mode", "values": ["online", "offline"]} in plain["differences"]
    text = printed(found)
    for words in ("9.00 → 4.50 (2.0× lower)", "0.0% → 40.0%", "1.90 GiB", "1,920", "teacher.mode", "3.50 s"):
        assert words in text


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base")
    dense = write_run(tmp_path / "dense", "loss.implementation=dense")
    chunked = write_run(tmp_path / "chunked", "loss.implementation=forward_chunked")
    tp3 = write_run(tmp_path / "tp3", recipe="smollm2_cpu_tp3")
    wide = write_run(tmp_path / "wide", "cluster.gpus_per_node=2", "training.global_batch_size=2")
    fast = write_run(tmp_path / "fast", "optimizer.lr=0.01")
    odd = write_run(tmp_path / "odd", "optimizer.lr=0.01", "seed=2", "name=odd")
    again = write_run(tmp_path / "again")

    def named(*places: Path) -> list[str]:
        return labels([read_run(place) for place in places])

    assert named(base, dense, chunked) == ["offline fused", "offline dense", "offline forward-chunked"]
    assert named(base, tp3) == ["offline fused", "offline fused, TP 3 + SP"]
    assert named(base, wide) == ["offline fused, 1 × cpu", "offline fused, 2 × cpu, DP 2"]
    assert named(base, fast)[1] == "lr 0.01"
    assert named(base, odd) == ["smollm2_cpu", "odd"]
    assert named(base, again) == ["base", "again"]
    twin = write_run(tmp_path / "other" / "base")
    assert named(base, twin) == [str(base), str(twin)]


def test_interrupted_and_resumed_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    append(run / "metrics.jsonl", '{"iteration": 5, "tok')
    record = read_run(run)
    assert record.notes == [] and len(record.metrics) == 4  # the run may be writing this line right now
    append(
        run / "metrics.jsonl", '\n{"iteration": 4, "tokens": 1920, "loss/kd": 3.0}\n{"iteration": 3, "loss/kd": NaN}\n'
    )
    record = read_run(run)
    assert [row["iteration"] for row in record.metrics] == [1, 2, 3, 4]
    assert record.metrics[3]["loss/kd"] == 3.0  # after a resume the later line counts
    assert record.series("loss/kd") == ([480.0, 960.0, 1920.0], [8.0, 6.0, 3.0])  # NaN is no figure
    assert len(record.notes) == 2 and "line 5 is no JSON object" in record.notes[0]
    assert record.notes[1].endswith("loss/kd is no finite number at iteration 3; left out")
    json.dumps(compare([run], tmp_path / "out").to_json(), allow_nan=False)


@pytest.mark.parametrize("width", [40, 80])
def test_many_runs_on_a_narrow_terminal_stand_below_each_other(tmp_path: Path, width: int) -> None:
    runs = [write_run(tmp_path / f"run_{n}", f"training.train_iters={70 + n}") for n in range(7)]
    found = compare(runs, tmp_path / "out")
    lines = printed(found, width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "Comparison of runs, 1 to" in text and "of 7" in text and "Settings that differ, 1 to" in text
    # No cell is broken into letters: each step time stands whole in its own column.
    assert sum(line.count("3.50 s") for line in lines if line.startswith(" step time")) == len(runs)
    assert "Comparison of runs, 1" not in printed(found, 400)


def test_half_empty_runs_get_dashes_and_notes(tmp_path: Path) -> None:
    full = write_run(tmp_path / "full")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "recipe.yaml").write_text((full / "recipe.yaml").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"iteration": 1, "tokens": 480, "loss/kd": "high"}\n')
    broken = write_run(tmp_path / "broken", evaluations=((0, 9.0),))
    (broken / "evaluations" / "iter_0000004.json").write_text('{"iteration": 4, "eval/')
    (broken / "environment.json").write_text("[]")
    found = compare([full, fresh, bare, broken], tmp_path / "out")
    columns = {run.label: run for run in found.runs}
    assert list(columns) == ["full", "fresh", "bare", "broken"]
    assert (columns["fresh"].iterations, columns["fresh"].heldout_kd_after) == (None, None)
    assert (columns["bare"].method, columns["bare"].layout, columns["bare"].train_kd_last) == (None, None, None)
    assert (columns["broken"].heldout_kd_before, columns["broken"].heldout_kd_after) == (9.0, None)
    notes = "\n".join(found.notes)
    for words in ("fresh/metrics.jsonl is missing", "bare/recipe.yaml is missing", "iter_0000004.json cannot be read"):
        assert words in notes
    assert "9.00 → –" in printed(found, 200)
    compare([fresh], tmp_path / "nothing yet")


def test_a_single_late_evaluation_is_after(tmp_path: Path) -> None:
    run = summarize(read_run(write_run(tmp_path / "a", evaluations=((4, 3.0),))), "a")
    assert (run.heldout_kd_before, run.heldout_kd_after, run.heldout_kd_factor) == (None, 3.0, None)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KDError, match="at least one run directory"):
        compare([], tmp_path)
    with pytest.raises(KDError, match="nowhere: no such run directory"):
        compare([tmp_path / "nowhere"], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(KDError, match=r"empty: not a run directory, it holds neither recipe.yaml nor metrics.jsonl"):
        compare([tmp_path / "empty"], tmp_path)
    run = write_run(tmp_path / "a")
    with pytest.raises(KDError, match="given twice"):
        compare([run, tmp_path / "empty" / ".." / "a"], tmp_path)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"--kl is \S+, must be a number above 0"):
            compare([run], tmp_path, wrong)
    (run / "recipe.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"recipe\.yaml, line 1"):
        compare([run], tmp_path)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_no_texts_overlap_in_the_picture(tmp_path: Path, count: int) -> None:
    places = [
        write_run(
            tmp_path / f"run_{index}",
            f"seed={index}",
            f"optimizer.lr={1e-3 * (index + 1)}",
            f"name=smollm2_135m_10layers_240_offline_1node_cpu{'_' + 'x' * 150 if index == 1 else ''}_variant_{index}",
            kd=tuple(8.0 - 0.01 * step - index for step in range(100)),
        )
        for index in range(count)
    ]
    records = [read_run(place) for place in places]
    summaries = [summarize(*pair) for pair in zip(records, labels(records), strict=True)]
    picture = comparison_figure(records, summaries, find_target(records))
    picture.canvas.draw()
    ticks, drawn_ticks = _tick_texts(picture)
    boxes = {
        text: text.get_window_extent()
        for text in picture.findobj(Text)
        if isinstance(text, Text) and text.get_text() and (text not in ticks or text in drawn_ticks)
    }
    assert len(boxes) > 8
    inside = picture.bbox.padded(1.0)
    for text, box in boxes.items():
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1, text
    assert [(a.get_text(), b.get_text()) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])] == []


def _tick_texts(picture: Any) -> tuple[set[Text], set[Text]]:
    """All texts of ticks, and those that are drawn: matplotlib keeps ticks beyond the limits of an axis as objects."""
    every: set[Text] = set()
    drawn: set[Text] = set()
    for axes in picture.axes:
        for axis, limits in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in axis.get_major_ticks():
                every |= {tick.label1, tick.label2}
                drawn |= {tick.label1} if limits[0] <= tick.get_loc() <= limits[1] else set()
    return every, drawn


def test_moving_average_against_its_definition() -> None:
    values = [1.0, 5.0, 3.0, 7.0, 4.0]
    assert moving_average(values, 1) == values
    assert moving_average(values, 3) == [3.0, 3.0, 5.0, pytest.approx(14 / 3), 5.5]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.8, "0.800"),
        (9.996, "10.0"),
        (42000.0, "42,000"),
        (42123.0, "42,100"),
        (0.0, "0.00"),
        (2e-5, "2.00e-05"),
    ],
)
def test_significant_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_short_times_are_in_milliseconds() -> None:
    assert (seconds(0.0021), seconds(2.0), seconds(None)) == ("2.10 ms", "2.00 s", "–")
    assert [hours_beside([0.001, None])(value) for value in (0.001, None)] == ["3.60 s", "–"]
    assert [hours_beside([0.001, 12.345])(value) for value in (0.001, 12.345)] == ["0.00100 h", "12.3 h"]


def test_comparing_needs_no_torch() -> None:
    code = "import sys, megatron_kd.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "False"
