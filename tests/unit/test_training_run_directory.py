"""The run directory: one training at a time, and a record of where it ran."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from megatron_kd.errors import ConfigError
from megatron_kd.training.run_directory import describe_environment, exclusive


def _hold(path: Path, held: Event) -> None:
    with exclusive(path):
        held.set()
        multiprocessing.Event().wait()


def test_one_training_at_a_time_and_the_dead_hold_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", held))
    other.start()
    assert held.wait(60)
    with pytest.raises(ConfigError, match="in use by another training"), exclusive(tmp_path / "run"):
        pass
    other.kill()
    other.join()
    with exclusive(tmp_path / "run"):
        pass


def test_the_environment_names_versions_revision_and_hardware() -> None:
    environment = describe_environment()
    assert environment["libraries"]["megatron-core"].startswith("0.19.")
    assert environment["hardware"]["cpu_count"] >= 1
    assert environment["git_revision"] is None or len(environment["git_revision"].removesuffix("+changes")) == 40
