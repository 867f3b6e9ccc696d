"""What tests ask of a run directory while a job works in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.assets import steps_of
from tests.slurm.cluster import Job, wait_until
from tests.training_runs import losses_of

STEPS, SAVE = 30, 10


def steps_done(run_dir: Path) -> int:
    """Lines of steps in the metrics."""
    file = run_dir / "metrics.jsonl"
    return sum('"loss/kd"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def saved(run_dir: Path) -> list[int]:
    """The iterations of all checkpoints."""
    return sorted(int(path.name.removeprefix("iter_")) for path in (run_dir / "checkpoints").glob("iter_*"))


def state_of(path: Path) -> dict[str, Any]:
    """A status.json."""
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """Iteration, loss and gradient norm of every step."""
    return losses_of(steps_of(run_dir))


def trained(job: Job, run_dir: Path, steps: int) -> None:
    """Waits until a job has written so many steps; fails as soon as it ended before."""

    def look() -> bool:
        if steps_done(run_dir) >= steps:
            return True
        assert job.facts["JobState"] not in ("FAILED", "COMPLETED", "CANCELLED"), said(job)
        return False

    wait_until(look, f"step {steps} of {run_dir}")


def said(job: Job) -> str:
    """The job's log and those of its nodes."""
    nodes = sorted(job.cluster.folder.glob(f"logs/*-{job.number}/*"))
    return "\n".join([job.log, *(f"--- {path.name}\n{path.read_text()}" for path in nodes)])
