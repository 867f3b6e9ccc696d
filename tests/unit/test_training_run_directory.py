"""The run directory: one training at a time, and a record of where it ran."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.device import StopOnSignal
from megatron_kd.errors import ConfigError
from megatron_kd.training.evaluate import read_evaluation, write_evaluation
from megatron_kd.training.run_directory import (
    describe_environment,
    exclusive,
    open_run_directory,
    truncate_metrics,
)
from tests.assets import ROOT


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


def test_ctrl_c_asks_first_and_ends_at_the_second() -> None:
    with StopOnSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_lines_that_are_no_records_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    for name in ("iter_0000001", "iter_0000009", "iter_mine"):
        (tmp_path / "evaluations" / f"{name}.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n"x"\n{"iteration": 2}\n{"iteration": 9}\n{"iter')
    truncate_metrics(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 1}\n{"iteration": 2}\n'
    left = sorted(path.stem for path in (tmp_path / "evaluations").iterdir())
    assert left == ["iter_0000001", "iter_mine"]


@pytest.mark.parametrize(
    ("override", "may_change"),
    [
        ("loss.divergence=jsd", False),
        ("loss.tail=renormalize_both", False),
        ("loss.beta=0.1", False),
        ("loss.mode=recompute", True),
        ("loss.chunk_mib=8", True),
        ("loss.gradient_mib=512", True),
    ],
)
def test_a_run_goes_on_with_its_loss_in_whatever_memory(tmp_path: Path, override: str, may_change: bool) -> None:
    recipe, run_dir = ROOT / "recipes/smollm2_cpu.yaml", tmp_path / "run"
    open_run_directory(load_recipe(recipe, [f"run_dir={run_dir}"]))
    (run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    write_evaluation(run_dir, 1, 10, {"eval/kd": 2.0}, load_recipe(recipe, [f"run_dir={run_dir}"]))
    changed = load_recipe(recipe, [f"run_dir={run_dir}", override])
    # An evaluation is the run's own as long as it was measured by the same divergence.
    assert read_evaluation(run_dir, 1, changed) == ({"eval/kd": 2.0} if may_change else None)
    assert read_evaluation(run_dir, 1, changed, from_cache=False) is None, "an online teacher says more than a cache"
    if may_change:
        open_run_directory(changed)
        return
    with pytest.raises(ConfigError, match=f"holds a run with {override.partition('=')[0]} .* another run_dir"):
        open_run_directory(changed)


def test_the_environment_names_versions_revision_and_hardware() -> None:
    environment = describe_environment()
    assert environment["libraries"]["megatron-core"].startswith("0.19.")
    assert environment["hardware"]["cpu_count"] >= 1
    assert environment["git_revision"] is None or len(environment["git_revision"].removesuffix("+changes")) == 40
