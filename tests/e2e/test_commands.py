"""The road by the public commands: import, prepare, capture, train, evaluate, compare, and looking into a cache."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import yaml

from tests.assets import ROOT, environment, megatron_kd, steps_of, succeed, tiny_recipe
from tests.e2e.road import files_below
from tests.warm import start, warm

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("road")
    tiny_recipe(path, training={"eval_interval": 10}, checkpoint={"save_interval": None})
    return path


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return folder / "recipe.yaml"


def figures(done: subprocess.CompletedProcess[str]) -> Any:
    """Standard output as one JSON document; anything else on it fails. Nothing of Python's own may stand in stderr."""
    succeed(done)
    for noise in ("Traceback", "Warning", "WARNING", "it/s]"):
        assert noise not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_import_from_a_cold_start(folder: Path, recipe: Path) -> None:
    done = megatron_kd("convert", "import", recipe, "--json")
    report = figures(done)
    assert report["checkpoint"] == str(folder / "teacher") and not report["reused"]
    # V·D embedding and V·D head, four layers of 4·D² attention and 3·D·F feed-forward, two norms each, a last norm.
    assert report["parameters"] == 2 * 1003 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64
    assert "importing weights: 27/27 tensors" in done.stderr
    before = {name: (folder / "teacher" / name).stat().st_mtime_ns for name in files_below(folder / "teacher")}
    again = figures(warm("convert", "import", recipe, "--json"))
    assert again == {**report, "reused": True}
    assert {name: (folder / "teacher" / name).stat().st_mtime_ns for name in before} == before


def test_prepare(folder: Path, recipe: Path) -> None:
    done = warm("prepare", recipe, "--json")
    assert figures(done) == {
        "samples": str(folder / "samples"),
        "rows": {"train": 50, "heldout": 10},
        "tokens": {"train": 2400, "heldout": 480},
    }
    assert "prepare: pack and write: 60/60 rows" in done.stderr
    before = {name: (folder / "samples" / name).stat().st_mtime_ns for name in files_below(folder / "samples")}
    again = warm("prepare", recipe)
    assert "50 train rows (2,400 tokens), 10 heldout rows (480 tokens)" in succeed(again).stdout
    assert again.stderr == "", "reused without work"
    assert {name: (folder / "samples" / name).stat().st_mtime_ns for name in before} == before


def test_capture_and_its_cache(folder: Path, recipe: Path) -> None:
    done = warm("capture", recipe, "--json")
    report = figures(done)
    assert (report["rows"], report["rows_captured"], report["tokens_captured"]) == (60, 60, 60 * 48)
    assert report["tokens_per_s"] == pytest.approx(report["tokens_captured"] / report["seconds"])
    assert "60/60 rows" in done.stderr
    again = figures(warm("capture", recipe, "--json"))
    assert (again["rows"], again["rows_captured"]) == (60, 0)

    seen = figures(warm("cache", "inspect", folder / "cache", "--json"))
    assert seen["complete"] and seen["missing_samples"] == ""
    assert (seen["rows"], seen["top_k"], seen["vocab_size"], seen["tokens"]) == (60, 20, 1003, 2880)
    assert seen["tokenizer"]["name"] == "teacher/tokenizer" and seen["teacher"]["name"] == "tiny_llama"
    assert f"{folder / 'cache'}: complete" in succeed(warm("cache", "inspect", folder / "cache")).stdout
    for level in ("inventory", "structure", "crc", "deep"):
        assert figures(warm("cache", "verify", folder / "cache", "--level", level, "--json"))["ok"]
    assert f"{folder / 'cache'}: no problem found at level crc" in warm("cache", "verify", folder / "cache").stdout


def test_train_offline_and_online(folder: Path, recipe: Path) -> None:
    """Offline alone, online on two ranks of a real torchrun, from the same data and seed."""
    offline = warm("train", recipe, "--json")
    report = figures(offline)
    assert report["run_dir"] == str(folder / "run")
    assert (report["iteration"], report["finished"], report["resumed_from"]) == (STEPS, True, 0)
    assert f"{STEPS}/{STEPS} steps" in offline.stderr
    lines = steps_of(folder / "run")
    assert [line["iteration"] for line in lines] == list(range(1, STEPS + 1))
    assert {name: lines[-1][name] for name in report["last"]} == report["last"]
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for line in lines for value in line.values())

    overrides = ["name=tiny_online", "teacher.mode=online", "cluster.gpus_per_node=2"]
    online = megatron_kd("train", recipe, f"run_dir={folder / 'online'}", *overrides, "--json", ranks=2)
    assert figures(online)["finished"], "printed once by two ranks"
    assert online.stderr.count(f"{STEPS}/{STEPS} steps") == 1
    kd = [step["loss/kd"] for step in steps_of(folder / "online")]
    # The whole distribution of this flat teacher holds more divergence than its top 20 and the rest as one outcome.
    assert len(kd) == STEPS and all(full > bucket["loss/kd"] for full, bucket in zip(kd, lines, strict=True))
    assert kd[-1] < kd[0]

    again = warm("train", recipe)
    assert f"{folder / 'run'}: iteration {STEPS}, finished" in succeed(again).stdout
    every = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in every if "eval/kd" in line] == [0, 10, STEPS]
    assert [line["iteration"] for line in every if "time/checkpoint_s" in line] == [STEPS]
    assert len(every) == STEPS + 3 + 1
    for name in ("recipe.yaml", "environment.json", "logs/rank_0.log", f"evaluations/iter_{STEPS:07d}.json"):
        assert (folder / "run" / name).is_file()
    assert files_below(folder / "run/evaluations") == [f"iter_{i:07d}.json" for i in (0, 10, STEPS)]


def test_evaluate_a_run_and_a_recipe(folder: Path, recipe: Path) -> None:
    done = warm("evaluate", folder / "run", "--json")
    after = figures(done)
    stored = json.loads((folder / f"run/evaluations/iter_{STEPS:07d}.json").read_text())
    assert after == {name: stored[name] for name in after} and {"by_position", "eval/top5_agreement"} <= after.keys()
    assert after["eval/perplexity"] == pytest.approx(math.exp(after["eval/ce"]))
    assert "10/10 batches" in done.stderr
    before = figures(warm("evaluate", recipe, f"run_dir={folder / 'fresh'}", "--json"))
    at_start = json.loads((folder / "run/evaluations/iter_0000000.json").read_text())
    # Within training the details are left out.
    assert {name: before[name] for name in at_start if name.startswith("eval/")} == {
        name: value for name, value in at_start.items() if name.startswith("eval/")
    }
    assert after["eval/kd"] < before["eval/kd"]
    # Two ranks share the held-out rows and print once; an odd number of batches is fine.
    first, second = start("evaluate", folder / "run", "cluster.gpus_per_node=2", "--json", ranks=2).wait()
    names = [name for name in after if name.startswith("eval/")]
    spread = figures(first)
    assert [spread[name] for name in names] == pytest.approx([after[name] for name in names], rel=1e-5)
    assert succeed(second).stdout == ""
    text = succeed(warm("evaluate", folder / "run")).stdout.splitlines()
    assert [line.split()[0] for line in text[: len(names)]] == names


def test_compare(folder: Path) -> None:
    out = folder / "comparison"
    found = figures(megatron_kd("compare", folder / "run", folder / "online", "--out", out, "--json"))
    assert [run["method"] for run in found["runs"]] == ["offline fused", "online fused"]
    assert [run["targets"] for run in found["runs"]] == ["top 20", "full distribution"]
    assert found["runs"][1]["layout"] == "2 × cpu, DP 2" and found["runs"][0]["iterations"] == STEPS
    assert {"teacher.mode", "cluster.gpus_per_node"} <= {entry["key"] for entry in found["differences"]}
    (note,) = found["notes"]
    assert "training KD is over" in note and "held-out KD was measured on the same targets" in note
    assert found["runs"][0]["gpu_hours"] > 0 and found["target"]["kl"] > 0 and found["hours"] == "rank-hours"
    page = Path(found["page"]).read_text()
    assert all(run["label"] in page for run in found["runs"]) and "src=" not in page
    picture = matplotlib.image.imread(found["figure"])
    assert picture.shape[0] > 300 and picture.shape[1] > 300 and picture.shape[2] in (3, 4)
    assert np.unique(picture[..., :3].reshape(-1, 3), axis=0).shape[0] > 10, "lines, text and background"
    table = succeed(warm("compare", folder / "run", folder / "online", "--out", out)).stdout
    for word in (
        "offline fused",
        "online fused",
        "held-out KD",
        "peak memory",
        "unigram",
        "rank-hours to KL",
        f"picture: {out}",
    ):
        assert word in table
    asked = warm("compare", folder / "run", "--out", out, "--kl", "1e-9").stdout
    assert "did not reach KL 1.00e-09" in " ".join(asked.split())


def test_show_is_quick_and_complete(recipe: Path, tmp_path: Path) -> None:
    code = "import sys; from megatron_kd.cli import main; main(); "
    program = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", program, "show", str(recipe), "training.train_iters=7", "name=seven"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert succeed(done).stderr == "False\n", "show imports no torch"
    shown = yaml.safe_load(done.stdout)
    assert shown["training"]["train_iters"] == 7 and shown["name"] == "seven"
    counted = figures(warm("show", recipe, "training.train_iters=7", "name=seven", "--json"))
    # tiny_llama and its cut: embedding and head, layers of norms, attention and SwiGLU, the last norm.
    layer = 2 * 64 + 4 * 64 * 64 + 3 * 64 * 160
    sizes = {role: 2 * 1003 * 64 + counted[role]["model"]["num_layers"] * layer + 64 for role in ("teacher", "student")}
    assert counted.pop("parameters") == sizes and counted.pop("active_parameters") == sizes
    assert counted == shown
    (tmp_path / "resolved.yaml").write_text(done.stdout)
    assert succeed(warm("show", tmp_path / "resolved.yaml")).stdout == done.stdout


@pytest.mark.parametrize(
    "command",
    [
        [],
        *(
            c.split()
            for c in ("show", "convert", "convert import", "convert export", "prepare", "capture", "train", "evaluate")
        ),
    ]
    + [c.split() for c in ("compare", "cache", "cache inspect", "cache verify", "cache clean", "version")],
    ids=" ".join,
)
def test_help(command: list[str]) -> None:
    """Every command explains itself, within a terminal of 80 columns and without a sentence cut short."""
    done = warm(*command, "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    text = succeed(done).stdout
    assert text.startswith(f"Usage: {' '.join(['megatron-kd', *command])} ")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")], text


def test_output_may_be_cut_short(recipe: Path) -> None:
    """``megatron-kd show … | head -1`` is no error to talk about."""
    line = f"{sys.executable} -m megatron_kd show {recipe} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_a_run_measured_otherwise_keeps_its_own_figures(folder: Path) -> None:
    kept = folder / f"run/evaluations/iter_{STEPS:07d}.json"
    before = kept.read_bytes()
    other = figures(warm("evaluate", folder / "run", "teacher.top_k=3", "--json"))
    assert other["eval/kd"] < json.loads(before)["eval/kd"], "a coarser bucket divides less"
    assert kept.read_bytes() == before


def test_what_a_run_recorded_stays_true(recipe: Path, folder: Path) -> None:
    """Neither a call that trains nothing nor another measure of its beginning rewrites a run."""
    kept = {name: (folder / "run" / name).read_bytes() for name in ("recipe.yaml", "evaluations/iter_0000000.json")}
    assert f"iteration {STEPS}, finished" in succeed(warm("train", recipe, "optimizer.lr=0.5")).stdout
    figures(warm("evaluate", recipe, "loss.tail=truncate", "--json"))
    assert {name: (folder / "run" / name).read_bytes() for name in kept} == kept


def test_a_stop_before_the_first_step_leaves_nothing_to_mend(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = start("train", recipe, f"run_dir={run}", "training.train_iters=3")
    deadline = time.monotonic() + 60
    while not (run / "logs/rank_0.log").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(started.pids[0], signal.SIGTERM)
    (done,) = started.wait()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "iteration 3, finished" in succeed(warm("train", recipe, f"run_dir={run}", "training.train_iters=3")).stdout
