"""The sweep itself: inputs first, then its points, one process after another; started again it does what is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_kd.config import Recipe
from megatron_kd.config.sweep import Point, Sweep
from megatron_kd.config.world import torchrun_line
from megatron_kd.errors import ConfigError, KDError
from megatron_kd.progress import duration
from megatron_kd.status import JobStatus
from megatron_kd.sweep.folder import check_trained, state_of, status_file, write_recipe
from megatron_kd.sweep.inputs import Inputs, inputs_of
from megatron_kd.sweep.launch import Process, Relay, Start


@dataclass
class Outcome:
    """How a sweep ended.

    Attributes:
        failed: the points that did not finish, and why.
        stopped: the signal that ended it, None where none did.
        ran: the points that were started.
    """

    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None
    ran: list[str] = field(default_factory=list)


def run_sweep(sweep: Sweep, points: Sequence[Point], *, only_inputs: bool = False, start: Start = Process) -> Outcome:
    """Makes what the points read and is not there, then trains those that are not finished, one after another.

    A point that fails does not end the sweep. SIGTERM, SIGUSR1 and Ctrl-C have the running command save and leave, and
    nothing is started after it.

    Args:
        points: of the sweep, those to be run.
        only_inputs: train none of them.
        start: starts a command.

    Raises:
        ConfigError, CacheError: before anything is started: points share a folder and want different things in it, a
            run was trained by another recipe, a recipe needs several machines.
        KDError: an input could not be made.
    """
    check_trained(list(points))
    left = list(points) if only_inputs else [point for point in points if state_of(point).name != "finished"]
    _check_nodes(left)
    names = {point.name for point in left}
    needed = [inputs for inputs in inputs_of(sweep) if names.intersection(inputs.points)]
    for inputs in needed:
        list(inputs.missing())  # a cache that does not fit is refused before anything is made
    outcome = Outcome()
    status = JobStatus(status_file(sweep), points=len(points), finished=len(points) - len(left))
    status_file(sweep).parent.mkdir(parents=True, exist_ok=True)
    with Relay(start) as relay, status:
        status.begin()
        for inputs in needed:
            for command in inputs.missing():
                if relay.received is not None:
                    break
                _make(sweep, inputs, command, relay)
        for number, point in enumerate([] if only_inputs else left, start=1):
            if relay.received is not None:
                break
            why = _train(sweep, point, f"[{number}/{len(left)}] {point.name}", relay)
            outcome.ran.append(point.name)
            if why is not None:
                outcome.failed[point.name] = why
            status.update(finished=sum(state_of(each).name == "finished" for each in points))
        if relay.received is not None:
            outcome.stopped = relay.received
            # What was stopped by us did not fail.
            outcome.failed = {name: why for name, why in outcome.failed.items() if why != STOPPED}
        if outcome.failed:
            status.update(failed=list(outcome.failed))
        status.ends(finished=outcome.stopped is None and not outcome.failed)
    return outcome


STOPPED = "stopped before its end"


def _train(sweep: Sweep, point: Point, label: str, relay: Relay) -> str | None:
    """Trains a point; what went wrong, None where it finished."""
    recipe = write_recipe(sweep, point.name, point.recipe)
    began = time.monotonic()
    status = _run(label, ["train", str(recipe)], point.recipe, relay, saves=True)
    state = state_of(point).name
    took = duration(time.monotonic() - began)
    if status == 0 and state == "finished":
        _say(f"{label}: finished, {took}")
        return None
    why = f"status {status}" if status != 0 else STOPPED if state == "stopped" else f"status 0, but its run is {state}"
    _say(f"{label}: {why}, {took}")
    return why


def _make(sweep: Sweep, inputs: Inputs, command: list[str], relay: Relay) -> None:
    recipe = inputs.for_capture()
    file = write_recipe(sweep, inputs.name, recipe)
    words = [*command[:2], str(file), *command[2:]] if command[0] == "convert" else [*command, str(file)]
    label = f"for {some(inputs.points)}"
    status = _run(label, words, recipe, relay, saves=command == ["capture"])
    if relay.received is None and status != 0:
        raise KDError(
            f"megatron-kd {' '.join(words)} failed with status {status}, and nothing was trained: its message stands "
            "above; mend that and start the sweep again"
        )


def _run(label: str, words: Sequence[str], recipe: Recipe, relay: Relay, *, saves: bool) -> int:
    """One command, on one rank or on those of the recipe."""
    ranks = 1 if words[0] == "prepare" else recipe.world_size
    line = torchrun_line(recipe.cluster, words) if ranks > 1 else f"megatron-kd {' '.join(words)}"
    _say(f"{label}: {line}")
    return relay.run(words, ranks, saves=saves)


def _check_nodes(points: Sequence[Point]) -> None:
    many = [point for point in points if point.recipe.cluster.nodes > 1]
    if many:
        raise ConfigError(
            f"{some([point.name for point in many])}: cluster.nodes is {many[0].recipe.cluster.nodes}, and this "
            "starts ranks on one machine alone: sbatch --array launch/sweep.sh starts them, or add cluster.nodes=1"
        )


def some(names: Sequence[str]) -> str:
    """A few names in words."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _say(line: str) -> None:
    print(f"sweep: {line}", file=sys.stderr, flush=True)


def write_recipes(sweep: Sweep, kind: str) -> list[Path]:
    """Writes the recipes of all points, or of all inputs, for scripts that start them in their own way; their paths."""
    if kind == "points":
        return [write_recipe(sweep, point.name, point.recipe) for point in sweep.points]
    return [write_recipe(sweep, inputs.name, inputs.for_capture()) for inputs in inputs_of(sweep)]
