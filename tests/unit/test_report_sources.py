"""Runs from where they lie: run directories, files of a real offline wandb run, a wandb server on loopback."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.errors import KDError
from megatron_kd.report import compare, read_run
from megatron_kd.report.sources import find_runs
from megatron_kd.report.summary import summarize
from megatron_kd.report.wandb_report import place_of, publish_report
from megatron_kd.report.wandb_server import Address, parse_address
from megatron_kd.training.wandb_view import WandbView
from tests.unit.report_runs import REPOSITORY, evaluated, steps, write_run

KD = (8.0, 6.0, 5.0, 4.0)
EVALUATIONS = ((0, 9.0), (1, 8.0), (2, 6.0), (4, 4.5))


def logged() -> list[dict[str, float]]:
    """Steps and evaluations in the order in which training logs them."""
    return sorted([*evaluated(EVALUATIONS), *steps(KD)], key=lambda row: (row["iteration"], "eval/kd" in row))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose wandb files were written in two starts, the second of which goes back by one step."""
    patch = pytest.MonkeyPatch()
    patch.setenv("WANDB_MODE", "offline")
    run = write_run(tmp_path_factory.mktemp("runs") / "run", kd=KD, evaluations=EVALUATIONS)
    recipe = load_recipe(REPOSITORY / "recipes/smollm2_cpu.yaml", [f"run_dir={run}"])
    rows = logged()
    crossed = {"iteration": 3, "tokens": 1440, "loss/kd": 99.0}  # lost when the second start went back to step 2
    for part in ([*rows[:5], crossed], rows[5:]):
        view = WandbView(recipe, run)
        for row in part:
            view.log(row)
        view.finish(failed=False)
        time.sleep(1.1)  # wandb names its folders by the second
    patch.undo()
    return run


@pytest.fixture
def files(trained: Path, tmp_path: Path) -> list[Path]:
    """The folders of wandb alone, away from their run directory."""
    copied = shutil.copytree(trained / "wandb", tmp_path / "copied" / "logs", symlinks=True)
    return sorted(copied.glob("offline-run-*"))


def test_offline_files_say_what_the_run_directory_says(trained: Path, files: list[Path]) -> None:
    assert len(files) == 2
    (source,) = find_runs(files)
    from_wandb, from_directory = source.read(), read_run(trained)
    one, other = (summarize(run, "x") for run in (from_wandb, from_directory))
    assert {**one.__dict__, "directory": ""} == {**other.__dict__, "directory": ""}
    assert from_wandb.series("kd") == from_directory.series("kd")
    assert from_wandb.evaluation_series("eval/kd") == from_directory.evaluation_series("eval/kd")
    assert from_wandb.environment["git_revision"] == "0123abc"
    assert from_wandb.wandb_id == from_directory.wandb_id == json.loads((trained / "wandb_run.json").read_text())["id"]
    assert from_wandb.setting("data.seq_length") == 240 and from_wandb.notes == []


def test_what_names_a_run(trained: Path, files: list[Path]) -> None:
    """Within a run directory wandb's folders stand for it; elsewhere a folder that holds them will do."""
    for arguments in ([trained], [trained / "wandb"], sorted((trained / "wandb").glob("offline-run-*"))):
        (source,) = find_runs(arguments)
        assert Path(source.place).resolve() == trained.resolve() and not source.folders
    for name in (files[0].parent, next(files[0].glob("*.wandb"))):
        (source,) = find_runs([name])
        assert source.folders == tuple(files if name == files[0].parent else files[:1])
    with pytest.raises(KDError, match="given twice"):
        find_runs([trained, trained / "wandb"])
    with pytest.raises(KDError, match="given twice"):
        find_runs([files[0], files[0]])


def test_a_copy_is_noted(trained: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    notes = compare([trained, copied], tmp_path / "out").notes
    assert any("run and copy are one run on wandb" in note for note in notes)


def test_damaged_files(files: list[Path], tmp_path: Path) -> None:
    """Half a file is what a killed run leaves: read up to there, with a note; none at all is an error."""
    log = next(files[0].glob("*.wandb"))
    data = log.read_bytes()
    for tenths in range(9, 0, -1):  # what else stands in the file, and so where its steps do, differs from run to run
        log.write_bytes(data[: len(data) * tenths // 10])
        record = find_runs([files[0]])[0].read()
        if len(record.metrics) < 4:
            break
    assert 0 < len(record.metrics) < 4 and record.setting("loss.implementation") == "fused"
    assert any("incomplete" in note for note in record.notes)
    for content in (b"", b"no log of wandb\n"):
        log.write_bytes(content)
        with pytest.raises(KDError, match="wandb's files cannot be read"):
            find_runs([files[0]])[0].read()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(KDError, match="nothing: not a run directory"):
        find_runs([tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://wandb.ai/us/kd/runs/ab12", Address("https://api.wandb.ai", "us", "kd", "ab12")),
        ("https://wandb.ai/us/kd/runs/ab12/overview?x=1", Address("https://api.wandb.ai", "us", "kd", "ab12")),
        (
            "https://forge.coreweave.com/wandb/us/kd/runs/ab12",
            Address("https://api.forge.coreweave.com", "us", "kd", "ab12"),
        ),
        ("http://wandb.corp:8080/us/kd/runs/ab12", Address("http://wandb.corp:8080", "us", "kd", "ab12")),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["wandb://kd/ab12", "https://wandb.ai/us/kd", "wandb:x", "http://"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(KDError, match="not the address of a run"):
        parse_address(text)


class _Server(BaseHTTPRequestHandler):
    """As much of wandb's interface as reading one run and saving one report takes."""

    config: ClassVar[dict[str, Any]] = {}
    rows: ClassVar[list[dict[str, float]]] = []
    saved: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        asked = json.loads(body) if self.path == "/graphql" else {}
        variables = asked.get("variables") or {}
        user = {"id": "1", "entity": "us", "username": "me", "name": "me", "email": "", "admin": False, "flags": "{}"}
        user |= {"teams": {"edges": []}, "apiKeys": {"edges": []}, "deletedAt": None}
        lines = [json.dumps({"_step": step, **row}) for step, row in enumerate(self.rows)]
        run = {
            "id": "1",
            "tags": [],
            "name": "ab12",
            "displayName": "run",
            "state": "finished",
            "config": json.dumps({key: {"value": value} for key, value in self.config.items()}),
            "summaryMetrics": "{}",
            "systemMetrics": "{}",
            "historyKeys": {"lastStep": len(lines) - 1, "keys": {}},
            "history": lines,
            "parquetHistory": {"liveData": [json.loads(line) for line in lines], "parquetUrls": []},
            "projectId": "2",
            "user": user,
        }
        node = {
            "id": "2",
            "name": "smollm2_cpu",
            "entityName": "us",
            "createdAt": "",
            "isBenchmark": False,
            "user": user,
        }
        answer: dict[str, Any] = {
            "viewer": user,
            "project": {"id": "2", "internalId": "2", "run": run if variables.get("name", "ab12") == "ab12" else None},
            "models": {"edges": [{"node": node, "cursor": ""}], "pageInfo": {"endCursor": None, "hasNextPage": False}},
        }
        if "upsertView" in asked.get("query", ""):
            self.saved.append(variables)
            view = {"id": "r1", "type": "runs", "displayName": variables["displayName"], "spec": variables["spec"]}
            answer["upsertView"] = {"view": {**view, "name": "n", "description": "", "project": node}, "inserted": True}
        text = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing on the terminal of the tests."""


@pytest.fixture
def server(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A wandb server that has the run, under the address that wandb talks to."""
    import wandb
    import yaml

    _Server.config = {**yaml.safe_load((trained / "recipe.yaml").read_text()), "environment": {"git_revision": "9"}}
    _Server.rows, _Server.saved = logged(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{serving.server_port}"
        wandb.teardown()  # what it knows of its settings is from before
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield address
        wandb.teardown()
        serving.shutdown()


def test_a_run_on_a_server(trained: Path, server: str) -> None:
    for address in ("wandb://us/smollm2_cpu/ab12", f"{server}/us/smollm2_cpu/runs/ab12"):
        (source,) = find_runs([address])
        from_server, from_directory = source.read(), read_run(trained)
        assert from_server.series("kd") == from_directory.series("kd")
        assert from_server.evaluation_series("eval/kd") == from_directory.evaluation_series("eval/kd")
        assert from_server.recipe == from_directory.recipe
        assert (from_server.wandb_id, from_server.environment, from_server.notes) == ("ab12", {"git_revision": "9"}, [])
    with pytest.raises(KDError, match="none: cannot be read from http"):
        find_runs(["wandb://us/smollm2_cpu/none"])[0].read()


def test_a_report_on_a_server(trained: Path, server: str, tmp_path: Path) -> None:
    found = compare([trained, "wandb://us/smollm2_cpu/ab12"], tmp_path)
    assert publish_report(found).startswith(f"{server}/us/smollm2_cpu/reports/")
    (saved,) = _Server.saved
    assert (saved["entityName"], saved["projectName"]) == ("us", "smollm2_cpu")
    blocks = {block["type"]: block for block in json.loads(saved["spec"])["blocks"]}
    grid = blocks["panel-grid"]["metadata"]
    panels = [panel["config"] for panel in grid["panelBankSectionConfig"]["panels"]]
    assert {panel["xAxis"] for panel in panels} == {"tokens"}
    shown = {metric for panel in panels for metric in panel["metrics"]}
    assert {"loss/kd", "perf/step_time_s", "memory/peak_gib", "perf/tflops_per_gpu"} <= shown
    (runs,) = grid["runSets"]
    (only,) = runs["filters"]["filters"]
    assert (only["key"]["name"], only["op"], only["value"]) == ("group", "=", "online_vs_offline")
    assert "| rank-hours to KL 4.50 |" in blocks["markdown-block"]["content"]


def test_a_report_needs_one_project_and_a_login(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_run(tmp_path / "other", "logging.wandb.project=other")
    with pytest.raises(KDError, match="it shows one project, the runs are of other, smollm2_cpu"):
        place_of([read_run(trained), read_run(other)])
    assert place_of([read_run(trained)]) == ("smollm2_cpu", "online_vs_offline", None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(KDError, match=r"no login for \S+: run `wandb login`, or set WANDB_API_KEY"):
        publish_report(compare([trained], tmp_path))
    with pytest.raises(KDError, match=r"no login for \S+: run `wandb login`"):
        find_runs(["wandb://us/smollm2_cpu/ab12"])[0].read()


@pytest.mark.slow
def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr("megatron_kd.report.wandb_server.TIMEOUT_S", 2)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/us/kd/runs/ab12"
        began = time.monotonic()
        with pytest.raises(KDError, match=r"cannot be read from http.*give the run directory"):
            find_runs([address])[0].read()
        assert time.monotonic() - began < 30
