"""Weights & Biases: offline files that say the same as metrics.jsonl, and no server that can stop a training."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.assets import environment, steps_of, succeed
from tests.e2e.road import captured_road
from tests.warm import start, warm

KEY = "0123456789abcdef0123456789abcdef01234567"
WANDB = [
    "logging.wandb.project=distillation",
    "logging.wandb.group=loss_comparison",
    "checkpoint.save_interval=null",
    "optimizer.lr_decay_iters=20",
]


@pytest.fixture(scope="module")
def recipe() -> Path:
    return captured_road() / "recipe.yaml"


def records(folder: Path) -> list[dict[str, Any]]:
    """All records of one offline run, read by wandb's own tool."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping a step, without wandb's own keys."""
    items = [record["history"]["item"] for record in records(folder) if record["type"] == "history"]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


def metrics(run: Path) -> list[dict[str, Any]]:
    """All lines, those of evaluations and checkpoints too."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_offline_files_hold_one_run_across_restarts(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed(warm("train", recipe, f"run_dir={run}", *WANDB, "training.train_iters=3"))
    time.sleep(1.0)  # wandb names its folders by the second
    succeed(warm("train", recipe, f"run_dir={run}", *WANDB, "training.train_iters=5"))
    folders = sorted((run / "wandb").glob("offline-run-*"))
    identity = json.loads((run / "wandb_run.json").read_text())["id"]
    assert len(folders) == 2 and all(folder.name.endswith(identity) for folder in folders)

    first, second = (history(folder) for folder in folders)
    logged, written = first + second, metrics(run)
    # Beside each of the two last steps, its checkpoint and its evaluation.
    assert [row["iteration"] for row in logged] == [0, 1, 2, 3, 3, 3, 4, 5, 5, 5]
    assert [set(row) for row in logged] == [set(row) for row in written]
    for ours, theirs in zip(logged, written, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)

    for folder in folders:
        (about,) = (record["run"] for record in records(folder) if record["type"] == "run")
        assert (about["project"], about["run_group"], about["job_type"]) == (
            "distillation",
            "loss_comparison",
            "offline",
        )
        assert (about["run_id"], about["display_name"], about["resume"]) == (identity, "tiny", True)
        config = {key: value for key, value in about["config"]["update"].items() if key != "_wandb"}
        resolved = yaml.safe_load((run / "recipe.yaml").read_text())
        resolved["training"]["train_iters"] = config["training"]["train_iters"]
        started_in, described = config.pop("environment"), json.loads((run / "environment.json").read_text())
        assert started_in.keys() == described.keys() and started_in["hardware"] == described["hardware"]
        assert folder != folders[-1] or started_in == described  # the run directory describes the last start
        assert config == resolved
        # Everything is drawn over tokens.
        steps = [record["metric"] for record in records(folder) if record["type"] == "metric"]
        assert any(step.get("glob_name") == "*" and step.get("step_metric") == "tokens" for step in steps)

    # The comparison reads the same from wandb's files alone as from the run directory.
    shutil.copytree(run / "wandb", tmp_path / "copied", symlinks=True)
    columns = [
        json.loads(succeed(warm("compare", place, "--out", tmp_path / "out", "--json")).stdout)["runs"][0]
        for place in (run, tmp_path / "copied")
    ]
    assert columns[0]["iterations"] == 5 and columns[0]["git_revision"] is not None
    assert columns[0].pop("directory") != columns[1].pop("directory")
    for name, value in columns[0].items():
        assert columns[1][name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), name
    # Without a login the table is printed all the same, and one line says what there is instead of a report.
    done = warm("compare", run, "--out", tmp_path / "out", "--wandb-report", env={"HOME": str(tmp_path)})
    assert done.returncode == 2 and "step time" in done.stdout
    assert "run `wandb login`, or set WANDB_API_KEY" in done.stderr and "compare.html" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@contextlib.contextmanager
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """Accepts every connection and never answers: what a firewall or an overloaded service looks like."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", accepted
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


def test_training_goes_on_without_a_server(recipe: Path, tmp_path: Path) -> None:
    """No login, nobody listening, and a server that accepts and never answers; all three at once to save time."""
    with silent_server() as (silent, accepted):
        quick = {"WANDB_INIT_TIMEOUT": "4", "HOME": str(tmp_path)}
        cases = {
            "no_login": (quick, "no login found, writing offline"),
            "refused": ({**quick, "WANDB_API_KEY": KEY}, "wandb cannot be reached"),
            "silent": ({**quick, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": silent}, "wandb cannot be reached"),
        }
        began = time.monotonic()
        started = {
            name: start(
                "train",
                recipe,
                f"run_dir={tmp_path / name}",
                *WANDB,
                "logging.wandb.mode=online",
                "training.train_iters=3",
                env=variables,
            )
            for name, (variables, _) in cases.items()
        }
        for job in started.values():
            (done,) = job.wait()
            assert "iteration 3, finished" in succeed(done).stdout
        assert time.monotonic() - began < 60
        assert accepted, "the silent server was asked"
    for name, (_, message) in cases.items():
        run = tmp_path / name
        log = (run / "logs/rank_0.log").read_text()
        assert message in log and f"wandb sync {run}/wandb/offline-run-*" in log
        (folder,) = (run / "wandb").glob("offline-run-*")
        assert [row.get("loss/kd") for row in history(folder)] == [row.get("loss/kd") for row in metrics(run)]
        assert len(steps_of(run)) == 3


def test_disabled_leaves_nothing(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed(warm("train", recipe, f"run_dir={run}", *WANDB, "logging.wandb.mode=disabled", "training.train_iters=3"))
    assert len(steps_of(run)) == 3
    assert not (run / "wandb").exists()


class _LosesInterest(http.server.BaseHTTPRequestHandler):
    """Lets a run begin, then answers nothing more: a service that goes down while a training runs."""

    released = threading.Event()

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["content-length"]))) if self.path == "/graphql" else {}
        name = query.get("variables", {}).get("name")
        answers = {
            "RunResumeStatus": {"model": {"bucket": None}},
            "UpsertBucket": {
                "upsertBucket": {
                    "bucket": {
                        "id": "1",
                        "name": name,
                        "displayName": name,
                        "project": {"id": "2", "name": "distillation", "entity": {"name": "someone"}},
                    },
                    "inserted": True,
                }
            },
        }
        answer = answers.get(query.get("operationName", ""))
        if answer is None:
            self.released.wait(60)
            return
        body = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing on the terminal of the tests."""


def test_a_server_lost_during_training(recipe: Path, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _LosesInterest)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = tmp_path / "run"
    environment = {
        "WANDB_API_KEY": KEY,
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_FINISH_TIMEOUT": "4",
        "HOME": str(tmp_path),
    }
    try:
        began = time.monotonic()
        online = [*WANDB, "logging.wandb.mode=online", "training.train_iters=3"]
        done = warm("train", recipe, f"run_dir={run}", *online, env=environment)
        assert time.monotonic() - began < 60
    finally:
        _LosesInterest.released.set()
        server.shutdown()
        server.server_close()
    assert "iteration 3, finished" in succeed(done).stdout
    assert "Traceback" not in done.stderr and "panic" not in done.stderr, done.stderr
    (folder,) = (run / "wandb").glob("run-*")
    assert f"wandb sync {folder}" in (run / "logs/rank_0.log").read_text()
    assert [row.get("loss/kd") for row in history(folder)] == [row.get("loss/kd") for row in metrics(run)]
