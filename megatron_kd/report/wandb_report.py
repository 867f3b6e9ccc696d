"""A report on the wandb server over the project and group of compared runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_kd.errors import KDError
from megatron_kd.report.palette import COLOURS
from megatron_kd.report.runs import RunRecord
from megatron_kd.report.text import figure
from megatron_kd.report.wandb_server import TIMEOUT_S, is_address, parse_address, reason_of
from megatron_kd.training.wandb_view import default_server, has_login

if TYPE_CHECKING:
    from megatron_kd.report.compare import Comparison

PANELS = (
    ("KD loss over tokens", "loss/kd"),
    ("Held-out KD over tokens", "eval/kd"),
    ("Step time (s)", "perf/step_time_s"),
    ("Peak memory of a rank (GiB)", "memory/peak_gib"),
    ("TFLOP/s per GPU", "perf/tflops_per_gpu"),
    ("Forward and backward of a step (s)", "time/forward_backward_s"),
    ("Top-1 agreement, held-out", "eval/top1_agreement"),
)
"""Titles and metrics, each over trained tokens."""


def publish_report(found: Comparison) -> str:
    """Makes the report on the server, and returns its address.

    Raises:
        KDError: the runs are not of one project, there is no login, wandb-workspaces is missing, or the server does
            not take the report.
    """
    project, group, entity = place_of(found.records)
    server = default_server()
    if not has_login():
        raise KDError(f"no wandb report: no login for {server}: run `wandb login`, or set WANDB_API_KEY")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(TIMEOUT_S))
    import wandb

    try:
        entity = entity or wandb.Api(timeout=TIMEOUT_S).default_entity
        report = build_report(found, project, group, str(entity))
        report.save()
        return str(report.url)
    except KDError:
        raise
    except Exception as error:
        raise KDError(
            f"no wandb report: {server} did not take it ({reason_of(error)}): check login and network"
        ) from None


def place_of(runs: Sequence[RunRecord]) -> tuple[str, str | None, str | None]:
    """Project of all the runs, and the group and the entity where they are all of one.

    Raises:
        KDError: the runs name no project, or several.
    """
    projects = {run.setting("logging.wandb.project") for run in runs}
    projects |= {parse_address(run.place).project for run in runs if is_address(run.place)}
    projects -= {None}
    if len(projects) != 1:
        listed = ", ".join(sorted(map(str, projects))) or "none"
        raise KDError(
            f"no wandb report: it shows one project, the runs are of {listed}: set logging.wandb.project in their "
            "recipes alike"
        )
    groups = {run.setting("logging.wandb.group") for run in runs}
    entities = {
        parse_address(run.place).entity if is_address(run.place) else run.setting("logging.wandb.entity")
        for run in runs
    } - {None}
    group = groups.pop() if len(groups) == 1 else None
    return str(projects.pop()), group, entities.pop() if len(entities) == 1 else None


def build_report(found: Comparison, project: str, group: str | None, entity: str) -> Any:
    """The report as an object of wandb-workspaces; nothing is sent.

    Raises:
        KDError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError:
        raise KDError("no wandb report: wandb-workspaces is not installed: pip install 'megatron-kd[report]'") from None
    colours = {
        run.wandb_id: wr.RunSettings(color=COLOURS[index % len(COLOURS)])
        for index, run in enumerate(found.records)
        if run.wandb_id is not None
    }
    runset = wr.Runset(
        entity=entity,
        project=project,
        name=group or "runs",
        filters=f"Group = '{group}'" if group else "",
        run_settings=colours,
    )
    panels = [
        wr.LinePlot(
            title=title,
            x="tokens",
            y=[metric],
            layout=wr.Layout(x=8 * (index % 3), y=7 * (index // 3), w=8, h=7),
        )
        for index, (title, metric) in enumerate(PANELS)
    ]
    return wr.Report(
        project=project,
        entity=entity,
        title=f"{(group or project).replace('_', ' ')}: {', '.join(run.label for run in found.runs)}"[:128],
        description="Written by megatron-kd compare.",
        width="fluid",
        blocks=[wr.PanelGrid(runsets=[runset], panels=panels), wr.MarkdownBlock(text=_markdown(found))],
    )


def _markdown(found: Comparison) -> str:
    """The figures that wandb does not compute: GPU-hours, held-out KD, notes."""
    unit = found.hours_name()
    lines = [
        f"| run | {unit} | {unit} to {found.target.goal} | peak GiB | held-out KD | agreement |",
        "|---|---|---|---|---|---|",
    ]
    for run in found.runs:
        cells = [
            run.gpu_hours,
            run.gpu_hours_to_target,
            run.peak_memory_gib,
            run.heldout_kd_after,
            run.agreement_after,
        ]
        lines.append(f"| {run.label} | {' | '.join(map(figure, cells))} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in found.notes)])
