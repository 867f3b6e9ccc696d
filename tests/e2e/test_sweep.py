"""A sweep as people run it: inputs once, points one after another, a failure, a stop, what is left, one table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from megatron_kd.cli.sweep import sweep as command
from megatron_kd.config.sweep import Sweep, load_sweep
from megatron_kd.errors import CacheError, ConfigError
from megatron_kd.sweep.folder import state_of
from megatron_kd.sweep.inputs import inputs_of
from megatron_kd.sweep.launch import Start
from megatron_kd.sweep.run import run_sweep
from megatron_kd.sweep.table import sweep_table
from tests.assets import megatron_kd, steps_of, succeed, tiny_recipe
from tests.e2e.road import captured_road, one_error_line
from tests.warm import Started, start, warm

STEPS = 4


class WarmJob:
    """A real command in a process forked from the warm server, behind the interface that the sweep starts jobs by."""

    def __init__(self, words: Sequence[str], ranks: int) -> None:
        assert ranks == 1
        self.started: Started = start(*words)

    def wait(self, timeout_s: float) -> int | None:
        """Asks for the status only once it has ended: the server kills what it waits for too long."""
        deadline = time.monotonic() + timeout_s
        while not self._has_ended():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        (done,) = self.started.wait()
        return int(done.returncode)

    def send(self, number: signal.Signals) -> None:
        """To the one rank."""
        os.kill(self.started.pids[0], number)

    def _has_ended(self) -> bool:
        text = Path(f"/proc/{self.started.pids[0]}/stat").read_text()
        return text.rpartition(")")[2].split()[0] == "Z"


def started(log: list[str], then: Any = None) -> Start:
    """Starts commands and notes them as words without the folder of the recipe; ``then`` sees each job."""

    def begin(words: Sequence[str], ranks: int) -> WarmJob:
        log.append(" ".join(Path(word).stem if word.endswith(".yaml") else word for word in words))
        job = WarmJob(words, ranks)
        if then is not None:
            then(log[-1], job)
        return job

    return begin


def write(folder: Path, **file: Any) -> Path:
    """A sweep over the tiny recipe whose teacher, samples and cache are there."""
    road = captured_road()
    if not (folder / "recipe.yaml").exists():
        for name in ("teacher", "samples", "cache"):
            shutil.copytree(road / name, folder / name)
        tiny_recipe(folder, training={"train_iters": STEPS}, optimizer={"lr_warmup_iters": 1})
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": "recipe.yaml", "run_dir": str(folder / "runs"), **file}, sort_keys=False))
    return path


def lines_of(folder: Path, point: str) -> int:
    file = folder / "runs" / point / "metrics.jsonl"
    return sum('"loss/kd"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def states(sweep: Sweep) -> dict[str, str]:
    return {point.name: state_of(point).name for point in sweep.points}


def test_the_command_makes_what_is_missing_and_trains_what_is_left(tmp_path: Path) -> None:
    """A cold command, which finds one point trained; the table, again without a run, and as JSON."""
    path = write(tmp_path, grid={"loss.divergence": ["forward_kl", "jsd"]})
    shutil.rmtree(tmp_path / "samples")
    listed = succeed(warm("sweep", path, "--dry-run"))
    assert "first, for divergence_forward_kl, divergence_jsd: prepare\n" in listed.stdout and listed.stderr == ""
    sweep = load_sweep(path)
    log: list[str] = []
    assert run_sweep(sweep, sweep.points[:1], start=started(log)).failed == {}
    assert log == ["prepare _inputs_1", "train divergence_forward_kl"]
    done = succeed(megatron_kd("sweep", path))
    said = [line for line in done.stderr.splitlines() if line.startswith("sweep: ")]
    recipe = tmp_path / "runs/_sweep/recipes/divergence_jsd.yaml"
    assert said[0] == f"sweep: [1/1] divergence_jsd: megatron-kd train {recipe}"
    assert len(said) == 2 and said[1].startswith("sweep: [1/1] divergence_jsd: finished, ")
    rows = [line.split() for line in done.stdout.splitlines() if "divergence_" in line and "finished" in line]
    assert [row[:3] for row in rows] == [
        ["divergence_forward_kl", "forward_kl", "finished"],
        ["divergence_jsd", "jsd", "finished"],
    ]
    assert json.loads((tmp_path / "runs/_sweep/status.json").read_text()) == {
        "state": "finished",
        "points": 2,
        "finished": 2,
    }
    again = succeed(warm("sweep", path))
    assert again.stdout == done.stdout and "sweep:" not in again.stderr, "nothing was left to do"
    table = json.loads(succeed(warm("sweep", path, "--table", "--json")).stdout)
    assert Path(table["page"]).is_file()
    for point in table["points"]:
        evaluated = json.loads((Path(point["run_dir"]) / f"evaluations/iter_{STEPS:07d}.json").read_text())
        figures = point["figures"]
        assert (point["state"], point["iteration"], figures["iterations"]) == ("finished", STEPS, STEPS)
        assert figures["heldout_forward_kl_after"] == evaluated["eval/forward_kl"]
        assert figures["heldout_kd_after"] == evaluated["eval/kd"]
    forward, jsd = (point["figures"] for point in table["points"])
    assert forward["heldout_forward_kl_after"] == forward["heldout_kd_after"]
    assert jsd["heldout_forward_kl_after"] > 2 * jsd["heldout_kd_after"]
    assert jsd["heldout_forward_kl_before"] == forward["heldout_forward_kl_before"], "one student, one yardstick"


def test_a_failing_point_does_not_end_it_and_what_is_left_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        runs={
            "first": {},
            "fails": {
                "student.from_teacher": None,
                "student.checkpoint": str(tmp_path / "gone"),
                "student.model.hf": None,
            },
            "last": {"seed": 5},
        },
    )
    sweep = load_sweep(path)
    log: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("megatron_kd.sweep.run.run_sweep", partial(run_sweep, start=started(log)))
        with pytest.raises(typer.Exit) as left:
            command(path)
    assert left.value.exit_code == 1
    printed = capsys.readouterr()
    assert "megatron-kd: error: 1 of 3 points did not finish: fails (status 2); what they said" in printed.err
    assert "Sweep mine" in printed.out
    assert log == ["train first", "train fails", "train last"]
    assert states(sweep) == {"first": "finished", "fails": "failed", "last": "finished"}
    status = json.loads((tmp_path / "runs/_sweep/status.json").read_text())
    assert (status["state"], status["finished"], status["failed"]) == ("stopped", 2, ["fails"])
    curve = steps_of(tmp_path / "runs/last")
    shutil.rmtree(tmp_path / "runs/last")
    done = warm("sweep", path, "--table")
    assert "waiting" in succeed(done).stdout and done.stderr == ""
    log.clear()
    run_sweep(sweep, [point for point in sweep.points if point.name != "fails"], start=started(log))
    assert log == ["train last"]
    names = ("loss/kd", "optim/grad_norm")
    assert [[step[name] for name in names] for step in steps_of(tmp_path / "runs/last")] == [
        [step[name] for name in names] for step in curve
    ]
    shown = {point.name: run for point, _, run in sweep_table(sweep).rows}
    assert shown["fails"] is None and shown["first"] is not None and shown["first"].iterations == STEPS
    refused = warm("sweep", path, "--only", "fials")
    one_error_line(refused, "--only fials: the sweep has no such point: did you mean fails?")


def test_a_signal_saves_the_running_point_and_ends_the_sweep(tmp_path: Path) -> None:
    path = write(tmp_path, grid={"seed": [1, 2]})
    sweep = load_sweep(path, ["training.train_iters=40"])
    log: list[str] = []

    def stop_at_step_3(words: str, job: WarmJob) -> None:
        def wait_and_send() -> None:
            while lines_of(tmp_path, "seed_1") < 3:
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGUSR1)

        threading.Thread(target=wait_and_send, daemon=True).start()

    before = signal.getsignal(signal.SIGUSR1)
    outcome = run_sweep(sweep, sweep.points, start=started(log, stop_at_step_3))
    assert signal.getsignal(signal.SIGUSR1) is before
    assert outcome.stopped == "SIGUSR1" and outcome.failed == {} and log == ["train seed_1"]
    assert states(sweep) == {"seed_1": "stopped", "seed_2": "waiting"}
    saved = state_of(sweep.points[0]).iteration
    assert 3 <= saved < 40
    assert json.loads((tmp_path / "runs/_sweep/status.json").read_text())["state"] == "stopped"
    short = load_sweep(path, ["training.train_iters=42"])
    outcome = run_sweep(short, short.points[:1], start=started(log))
    assert outcome.failed == {} and log[-1] == "train seed_1"
    assert [step["iteration"] for step in steps_of(tmp_path / "runs/seed_1")] == list(range(1, 43))


def test_refusals_before_anything_is_started(tmp_path: Path) -> None:
    def refused(kind: type[Exception], says: str, *overrides: str, **file: Any) -> None:
        sweep = load_sweep(write(tmp_path, **file), overrides)
        with pytest.raises(kind, match=says):
            run_sweep(sweep, sweep.points, start=lambda words, ranks: pytest.fail(f"started {words}"))

    refused(CacheError, "keeps 20 tokens a position at .* needs 30 at", grid={"teacher.top_k": [10, 30]})
    refused(CacheError, r"at the temperatures \[1.0\], the sweep needs 20 at", grid={"loss.temperature": [1.0, 2.0]})
    refused(ConfigError, "sbatch --array launch/sweep.sh", "cluster.nodes=2", grid={"seed": [1]})
    (inputs,) = inputs_of(load_sweep(write(tmp_path, grid={"seed": [1, 7]}), ["teacher.top_k=9"]))
    assert inputs.recipe.teacher.top_k == 9 and inputs.for_capture().teacher.top_k == 20
    assert list(inputs.missing()) == [], "a cache that keeps more serves as it is"
    done = warm("sweep", write(tmp_path, grid={"seed": [1]}), env={"WORLD_SIZE": "2"})
    one_error_line(done, "start it alone, without torchrun or srun")


def test_a_finished_run_of_another_recipe_is_not_passed_off_as_this_one(tmp_path: Path) -> None:
    path = write(tmp_path, grid={"seed": [1]})
    sweep = load_sweep(path)
    assert run_sweep(sweep, sweep.points, start=started([])).failed == {}
    changed = load_sweep(path, ["optimizer.lr=0.002"])
    with pytest.raises(ConfigError, match=r"seed_1 was trained with optimizer.lr 0.001, now 0.002: remove what"):
        run_sweep(changed, changed.points)
    harmless = load_sweep(path, ["logging.log_interval=2", "teacher.temperatures=[1.0]"])
    log: list[str] = []
    assert run_sweep(harmless, harmless.points, start=started(log)).failed == {} and log == []


def test_recipes_for_scripts(tmp_path: Path) -> None:
    path = write(tmp_path, grid={"seed": [1, 2]})
    points = succeed(warm("sweep", path, "training.train_iters=9", "--write", "points")).stdout.splitlines()
    assert [Path(name).stem for name in points] == ["seed_1", "seed_2"]
    assert yaml.safe_load(Path(points[1]).read_text())["training"]["train_iters"] == 9
    (inputs,) = json.loads(succeed(warm("sweep", path, "--write", "inputs", "--json")).stdout)
    assert yaml.safe_load(Path(inputs).read_text())["teacher"]["cache"] == str(tmp_path / "cache")
