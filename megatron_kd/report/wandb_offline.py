"""Reading what wandb wrote on disk, through its own command and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_kd.errors import KDError
from megatron_kd.report.runs import RunRecord, number, run_of_records

PATIENCE_S = 300.0
"""For one folder; an hour of log lines takes a second."""


def offline_folders(path: Path) -> list[Path]:
    """Folders with a log of wandb: the path itself, those right in it, or those in its ``wandb``; oldest first."""
    if path.suffix == ".wandb" and path.is_file():
        return [path.parent]
    if not path.is_dir():
        return []
    if _log(path) is not None:
        return [path]
    for place in (path, path / "wandb"):
        inside = [*place.glob("offline-run-*"), *place.glob("run-*")]
        # latest-run is a link to one of them.
        folders = [folder for folder in inside if not folder.is_symlink() and _log(folder) is not None]
        if folders:
            return sorted(folders, key=start_of)
    return []


def start_of(folder: Path) -> str:
    """What folders sort by: the time of the start, which their names have behind "run-" or "offline-run-"."""
    return folder.name.removeprefix("offline-")


def run_id(folder: Path) -> str:
    """The id that all folders of one run share."""
    log = _log(folder)
    assert log is not None
    return log.stem.removeprefix("run-")


def read_offline(folders: Sequence[Path]) -> RunRecord:
    """One run from the folders of its starts, oldest first.

    A start takes the run up at a checkpoint: what the starts before it logged behind that point is left out.

    Raises:
        KDError: a folder cannot be read.
    """
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    notes: list[str] = []
    for folder in folders:
        records = _records(folder, notes)
        for record in records:
            if record.get("type") in ("run", "config"):
                config |= _configuration(record)
        now = [item for record in records if (item := _logged(record)) is not None]
        begins = next((number(row.get("iteration")) for row in now), None)
        if begins is not None:
            rows = [row for row in rows if (number(row.get("iteration")) or 0.0) <= begins]
        rows += now
    return run_of_records(str(folders[-1]), run_id(folders[-1]), config, rows, notes)


def _log(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.wandb"))), None)


def _configuration(record: dict[str, Any]) -> dict[str, Any]:
    run = record.get("run")
    config = run.get("config") if isinstance(run, dict) else record.get("config")
    update = config.get("update") if isinstance(config, dict) else None
    return update if isinstance(update, dict) else {}


def _logged(record: dict[str, Any]) -> dict[str, Any] | None:
    history = record.get("history") if record.get("type") == "history" else None
    item = history.get("item") if isinstance(history, dict) else None
    return item if isinstance(item, dict) else None


def _records(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """All records of a folder. The last one may be half written: what stands before it counts.

    Raises:
        KDError: wandb's command is missing or too old, or finds nothing.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(_log(folder))]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KDError(f"{folder}: wandb's files cannot be read: {error}") from None
    records = []
    for line in done.stdout.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    # It says on standard error what it skipped, and ends well all the same.
    said = [line.partition(": ")[2] or line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode or not any(record.get("type") in ("run", "history") for record in records):
        raise KDError(
            f"{folder}: wandb's files cannot be read{f' ({said[-1][:200]})' if said else ''}: it takes wandb ≥ 0.31, "
            "whose `wandb leet inspect --json` prints them"
        )
    notes += [f"{folder}: {line[:200]}" for line in said]
    return records
