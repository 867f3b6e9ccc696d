"""What a job writes about itself, however it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.status import JobStatus


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("finished", "state"), [(True, "finished"), (False, "stopped")])
def test_a_job_that_ends_well(tmp_path: Path, finished: bool, state: str) -> None:
    path = tmp_path / "status.json"
    with JobStatus(path, iteration=0, train_iters=9) as status:
        status.begin()
        assert read(path) == {"state": "running", "iteration": 0, "train_iters": 9}
        status.update(iteration=4)
        assert read(path) == {"state": "running", "iteration": 4, "train_iters": 9}
        status.ends(finished=finished)
    assert read(path) == {"state": state, "iteration": 4, "train_iters": 9}
    assert list(tmp_path.iterdir()) == [path]


def test_a_job_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "status.json"

    def job() -> None:
        with JobStatus(path) as status:
            status.begin()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job()
    assert read(path) == {"state": "failed"}


def test_a_failure_is_not_hidden_by_a_disk_that_takes_no_status(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def job() -> None:
        with JobStatus(folder / "status.json") as status:
            status.begin()
            shutil.rmtree(folder)
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        job()


def test_a_finished_job_that_is_looked_at_again_stays_finished(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"state": "finished"}')

    def job() -> None:
        with JobStatus(path) as status:
            status.update(iteration=3)
            raise ValueError("no cache")

    with pytest.raises(ValueError, match="no cache"):
        job()
    assert read(path) == {"state": "finished"}


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with JobStatus(None) as status:
        status.begin()
        status.update(iteration=1)
        status.ends(finished=True)
    assert list(tmp_path.iterdir()) == []
