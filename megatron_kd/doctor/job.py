"""The examination: each node by its first rank, the links and the losses by all ranks, the recipe's inputs once.

Ranks meet in a store (roll_call.py) and tell the first one what they found. A rank that is missing, dies or hangs
becomes a finding that names it; nothing waits longer than a timeout.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_kd.config import Recipe
from megatron_kd.config.world import torchrun_line
from megatron_kd.device import is_cuda, select_device
from megatron_kd.device.probe import cuda_state
from megatron_kd.doctor.check import Check, NoAnswerError, attempt, fail, in_words, not_needed, ok, warn, within
from megatron_kd.doctor.exchange import measure_exchange, open_groups
from megatron_kd.doctor.inputs import (
    check_cache_of,
    check_checkpoints_of,
    check_mounts,
    check_samples_of,
    check_tokenizer_of,
    visible_paths,
)
from megatron_kd.doctor.launcher import node_name
from megatron_kd.doctor.node import LOCAL_S, check_node
from megatron_kd.doctor.numerics import check_losses
from megatron_kd.doctor.report import DoctorReport
from megatron_kd.doctor.roll_call import Meeting
from megatron_kd.doctor.target import Target
from megatron_kd.doctor.wandb_login import check_wandb
from megatron_kd.errors import ConfigError, RemoteRankError

INPUTS_S = 300.0
_GROUPS = "process groups"
_LINKS = "look at its log; NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME choose the network"


@dataclass(frozen=True)
class Patient:
    """What is examined.

    Attributes:
        recipe: None for the installation alone.
        arguments: the recipe's file and its overrides, for the commands that are recommended.
        timeout: seconds to wait for ranks.
        quick: no measurement of disks and links, no self-test.
    """

    recipe: Recipe | None
    arguments: Sequence[str]
    timeout: float
    quick: bool


def examine(patient: Patient, publish: Callable[[DoctorReport], None]) -> bool:
    """Everything; called by every rank.

    Args:
        publish: called on the first rank with what all found, while the others wait.

    Returns:
        Whether nothing failed, on all ranks.

    Raises:
        RemoteRankError: on a rank that does not hear from the first one.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        report = _examine_alone(patient)
        publish(report)
        return report.ok
    meeting = Meeting(node_name(), patient.timeout)
    absent = meeting.call_roll()
    target = _target(patient, meeting.world)
    devices = _devices(meeting, target)
    first_of_node: dict[str, int] = {}
    for rank, seat in meeting.seats.items():
        first_of_node.setdefault(seat.node, rank)
    if meeting.rank in first_of_node.values():
        here = meeting.seats[meeting.rank].node
        peers = [seat.pid for seat in meeting.seats.values() if seat.node == here]
        of_node = check_node(target, peers, quick=patient.quick)
        meeting.tell("node", {"checks": [check.to_dict() for check in of_node], "seen": _seen(patient.recipe)})
    if absent or devices:
        # Each rank alone, while nobody waits for anybody.
        shared = [] if patient.quick or meeting.rank else check_losses()
    else:
        shared = _examine_together(meeting, target, quick=patient.quick)
    if meeting.rank:
        # The first rank may be at the inputs for a while yet.
        well = bool(meeting.hear_first("verdict", 6 * INPUTS_S))
        meeting.take_leave()
        return well
    checks = [*_roll(meeting, absent, target), *devices, *_of_nodes(meeting, first_of_node)]
    report = DoctorReport([*checks, *shared, *_examine_inputs(patient)], len(meeting.seats), list(first_of_node))
    publish(report)
    meeting.tell("verdict", report.ok)
    meeting.take_leave()
    return report.ok


def _examine_alone(patient: Patient) -> DoctorReport:
    target = _target(patient, 1)
    checks = [*_only_one(patient), *_choose_device(target)]
    checks += [check.on(node_name()) for check in check_node(target, (), quick=patient.quick)]
    if not patient.quick:
        checks += check_losses()
    return DoctorReport([*checks, *_examine_inputs(patient)], 1, [node_name()])


def _target(patient: Patient, world: int) -> Target:
    if patient.recipe is not None:
        return Target(patient.recipe, patient.recipe.cluster.gpu, world)
    return Target(None, "any" if cuda_state().available else "cpu", world)


def _choose_device(target: Target) -> list[Check]:
    """Where no GPU can be had the rest is examined on the CPU; why is said once, by the checks of GPUs."""
    try:
        select_device(target.gpu)
    except ConfigError as error:
        select_device("cpu")
        return [fail("device", str(error), "see the line on gpus; the losses are tried on the CPU")]
    return []


def _devices(meeting: Meeting, target: Target) -> list[Check]:
    """The ranks that have no device of theirs. Called by all ranks; the same on all."""
    meeting.tell("device", [check.to_dict() for check in _choose_device(target)])
    told = meeting.collect("device", meeting.seats)
    without = [Check(**check) for checks in told.values() for check in checks]
    silent = [str(seat) for rank, seat in meeting.seats.items() if rank not in told]
    if silent:
        without.append(fail("device", f"no answer from {', '.join(silent)}", "look at that rank's log"))
    return list(dict.fromkeys(without))


def _only_one(patient: Patient) -> list[Check]:
    recipe = patient.recipe
    if recipe is None or recipe.world_size == 1:
        return [not_needed("ranks", "one rank is all there is")]
    line = torchrun_line(recipe.cluster, ["doctor", *patient.arguments])
    return [warn("ranks", f"1 here, the recipe has {recipe.world_size}: links and other nodes were not tried", line)]


def _roll(meeting: Meeting, absent: list[int], target: Target) -> list[Check]:
    if absent:
        return [
            fail(
                "ranks",
                f"{len(meeting.seats)} of {meeting.world} came within {meeting.timeout:.0f} s; missing: rank "
                f"{', '.join(map(str, absent))}; there: {_places(meeting)}",
                "look at the logs of the missing ones and at their nodes",
            )
        ]
    recipe = target.recipe
    if recipe is not None and meeting.world != recipe.world_size:
        line = torchrun_line(recipe.cluster, ["doctor"])
        return [fail("ranks", f"{meeting.world} started, the recipe has {recipe.world_size}", f"start as {line} …")]
    return [ok("ranks", f"all {meeting.world} answer: {_places(meeting)}")]


def _places(meeting: Meeting) -> str:
    nodes: dict[str, list[int]] = {}
    for rank, seat in meeting.seats.items():
        nodes.setdefault(seat.node, []).append(rank)
    return ", ".join(f"{node} ({len(ranks)} from {ranks[0]})" for node, ranks in nodes.items())


def _seen(recipe: Recipe | None) -> list[str]:
    try:
        return [] if recipe is None else within(LOCAL_S, lambda: visible_paths(recipe))
    except (NoAnswerError, OSError):
        return []


def _of_nodes(meeting: Meeting, first_of_node: dict[str, int]) -> list[Check]:
    """What the first rank of each node tells."""
    told = meeting.collect("node", first_of_node.values(), 8 * LOCAL_S)
    checks: list[Check] = []
    for node, rank in first_of_node.items():
        found = [Check(**each) for each in told[rank]["checks"]] if rank in told else [_silent(rank)]
        checks += [check.on(node) for check in found]
    if len(first_of_node) > 1:
        checks += check_mounts({node: told[rank]["seen"] for node, rank in first_of_node.items() if rank in told})
    return checks


def _silent(rank: int) -> Check:
    return fail("node", f"no answer from its first rank {rank}", "look at its log; a file system may hang there")


def _examine_together(meeting: Meeting, target: Target, *, quick: bool) -> list[Check]:
    """Links, then losses. Called by all ranks; the findings of the first are those of the job."""
    links = _links(meeting, quick=quick)
    if quick:
        return [links]
    if not meeting.agreed(_GROUPS):
        return [links, *check_losses()]
    tp = _tensor_parallel_size(target, meeting.world)
    return [links, *check_losses(tp, meeting)]


def _tensor_parallel_size(target: Target, world: int) -> int:
    if target.recipe is None:
        return world if world <= 8 else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = target.recipe.parallelism.tensor_model_parallel_size
    return size if world % size == 0 else 1


def _links(meeting: Meeting, *, quick: bool) -> Check:
    def exchange() -> dict[str, float]:
        open_groups(meeting)
        return measure_exchange(small=quick)

    try:
        rates = within(4 * meeting.timeout, lambda: meeting.together(_GROUPS, exchange))
    except Exception as error:
        stuck = meeting.absent(_GROUPS) if not isinstance(error, RemoteRankError) else []
        who = f"{', '.join(stuck)} did not finish: " if stuck else ""
        return fail("links", f"{who}{in_words(error)}", _LINKS)
    figures = ", ".join(f"{name} {rate:.2f} GiB/s" for name, rate in rates.items())
    backend = "nccl" if is_cuda() else "gloo"
    return ok("links", f"{backend}, {meeting.world} ranks: {figures} over the slowest link")


def _examine_inputs(patient: Patient) -> list[Check]:
    recipe, name = patient.recipe, shlex.join(patient.arguments)
    checks = attempt("wandb", "set logging.wandb.mode=offline", LOCAL_S, lambda: check_wandb(recipe))
    if recipe is None:
        return checks
    checks += attempt("tokenizer", "correct data.tokenizer", INPUTS_S, lambda: check_tokenizer_of(recipe))
    checks += attempt("samples", "look at data.samples", INPUTS_S, lambda: check_samples_of(recipe, name))
    checks += attempt("cache", "look at teacher.cache", INPUTS_S, lambda: check_cache_of(recipe, name))
    return checks + attempt("checkpoints", "look at them", INPUTS_S, lambda: list(check_checkpoints_of(recipe, name)))
