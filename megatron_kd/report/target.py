"""GPU-hours to a given divergence: which curve is asked, which value, and what may not be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_kd.report.curves import Curve, heldout_curve, hours_to, training_curve, window
from megatron_kd.report.runs import RunRecord, number
from megatron_kd.report.text import figure

EVALUATIONS_FOR_A_CURVE = 4
"""Held-out evaluations that a run needs before the line through them says when a value was reached."""


@dataclass(frozen=True)
class Target:
    """The divergence that all runs are asked for.

    Attributes:
        value: None where there is none: no run recorded any, or their divergences are of different kinds.
        basis: "held-out evaluations" or "training curve, smoothed".
        hours: of each run; None where it never got there, or recorded no times.
        final: the last value on that curve, of each run.
        given: whether the value was asked for.
        measure: KL, JSD or TVD.
    """

    value: float | None
    basis: str
    hours: list[float | None]
    final: list[float | None]
    given: bool = False
    measure: str = "KL"

    @property
    def goal(self) -> str:
        """What is to be reached, such as "KL 3.38"."""
        return f"a given {self.measure}" if self.value is None else f"{self.measure} {figure(self.value)}"

    def explained(self, hours_name: str) -> str:
        """A sentence on what the hours to the target are."""
        origin = "as asked for" if self.given else "the highest of the runs' final values"
        return (
            f"{hours_name} to {self.goal} ({origin}): {self.basis}. They count training steps on all "
            "ranks; starts, evaluations, saves and the capture of the cache, once for all runs on it, are not in them."
        )


def find_target(runs: Sequence[RunRecord], wanted: float | None = None) -> Target:
    """The given divergence, or the highest of the runs' final ones, which all of them reach.

    Held-out evaluations are asked where every run has enough of them for a curve, otherwise the smoothed training
    curves.
    """
    curves = [heldout_curve(run) for run in runs]
    basis = "held-out evaluations"
    if any(len(curve.values) < EVALUATIONS_FOR_A_CURVE for curve in curves):
        trained = [training_curve(run) for run in runs]
        widths = sorted({window(len(curve.values)) for curve in trained if curve.values} - {1})
        basis = f"training curve, mean of {' or '.join(map(str, widths))} logged steps" if widths else "training curve"
        curves = [curve.smooth() for curve in trained]
    final = [curve.values[-1] if curve.values else None for curve in curves]
    value = wanted
    if value is None and len(_kinds(runs)) <= 1:
        value = max((last for last in final if last is not None), default=None)
    measure = next(iter(_kinds(runs)), "kl").rpartition("_")[2].upper() if len(_kinds(runs)) <= 1 else "KL"
    return Target(value, basis, [_asked(curve, value) for curve in curves], final, wanted is not None, measure)


def _asked(curve: Curve, value: float | None) -> float | None:
    return None if value is None else hours_to(curve, value)


def comparability_notes(runs: Sequence[RunRecord], labels: Sequence[str], target: Target) -> list[str]:
    """What the reader of the table must know before comparing two of its columns."""
    notes = []
    kinds = _kinds(runs)
    trained = sorted({measure for run in runs if (measure := _measure(run)) is not None})
    heldout = {_heldout_targets(run) for run in runs}
    if len(kinds) > 1:
        notes.append(
            f"the runs have different divergences ({', '.join(sorted(kinds))}): their KD values do not compare; "
            "compare held-out forward KL, perplexity and agreement"
        )
    elif len(trained) > 1:
        alike = len(heldout) == 1 and None not in heldout
        notes.append(
            f"training KD is over {' or '.join(trained)}, whose levels do not compare: a KL over the top K and one "
            "bucket is a lower bound of the whole one; "
            + ("held-out KD was measured on the same targets" if alike else "perplexity and agreement compare")
        )
    if len(heldout - {None}) > 1 and len(kinds) <= 1:
        notes.append("held-out KD was measured on different targets (other rows, or another K): levels do not compare")
    seen: dict[str, str] = {}
    for label, run in zip(labels, runs, strict=True):
        if run.wandb_id is not None and (other := seen.setdefault(run.wandb_id, label)) != label:
            notes.append(f"{other} and {label} are one run on wandb ({run.wandb_id}): the same run twice, or a copy")
    for label, hours, last in zip(labels, target.hours, target.final, strict=True):
        if target.value is not None and hours is None and last is not None:
            reason = "did not reach" if last > target.value else "recorded no times on the way to"
            notes.append(f"{label} {reason} {target.goal} (last: {figure(last)})")
    return notes


def _kinds(runs: Sequence[RunRecord]) -> set[str]:
    """Divergences of the runs that say which, such as forward_kl."""
    return {kind for run in runs if isinstance(kind := run.setting("loss.divergence"), str)}


def _heldout_targets(run: RunRecord) -> tuple[float, ...] | None:
    """What tells the targets of a run's last evaluation from others: how many there were, and the mass they kept."""
    if not run.evaluations:
        return None
    found = [number(run.evaluations[-1].get(key)) for key in ("eval/tokens", "eval/teacher_mass")]
    return tuple(round(value, 6) for value in found if value is not None) if None not in found else None


def _measure(run: RunRecord) -> str | None:
    """What the divergence is taken over, in words."""
    if run.setting("loss.divergence") is None:
        return None
    temperature = run.setting("loss.temperature")
    at = f", temperature {temperature:g}" if isinstance(temperature, int | float) and temperature != 1 else ""
    if run.setting("teacher.targets") == "full":
        return f"the whole vocabulary{at}"
    return f"the top {run.setting('teacher.top_k')} with tail {run.setting('loss.tail')}{at}"
