"""Curves of a run over trained tokens and over GPU-hours, and how many of these it took to reach a divergence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_kd.report.runs import RunRecord, number

POINTS_A_WINDOW = 20
"""Curves are smoothed over one point in so many, and not at all where they are shorter."""
MOST_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """A metric of a run: equally long lists, by rising iteration.

    Attributes:
        tokens: trained tokens of each point.
        hours: GPU-hours of each point, None where the run recorded no step times.
    """

    tokens: list[float]
    hours: list[float] | None
    values: list[float]

    def over(self, axis: str) -> list[float]:
        """The x values on an axis, "tokens" or "hours"; empty where there are none."""
        return self.tokens if axis == "tokens" else self.hours or []

    def smooth(self) -> Curve:
        """The same points, each value a moving average."""
        return Curve(self.tokens, self.hours, moving_average(self.values, window(len(self.values))))


def training_curve(run: RunRecord) -> Curve:
    """The divergence of each logged step."""
    return _curve(run, run.metrics, "kd")


def heldout_curve(run: RunRecord) -> Curve:
    """The divergence on the held-out split at each evaluation."""
    return _curve(run, run.evaluations, "eval/kd")


def _curve(run: RunRecord, rows: Sequence[dict[str, object]], key: str) -> Curve:
    clock = Clock(run)
    tokens: list[float] = []
    hours: list[float | None] = []
    values: list[float] = []
    for row in rows:
        position, value, iteration = number(row.get("tokens")), number(row.get(key)), number(row.get("iteration"))
        if position is not None and value is not None and iteration is not None:
            tokens.append(position)
            values.append(value)
            hours.append(clock.hours_at(iteration))
    known = [hour for hour in hours if hour is not None]
    return Curve(tokens, known if known and len(known) == len(hours) else None, values)


class Clock:
    """GPU-hours of a run's training steps: the time of its steps times its ranks.

    Steps between two logged ones count as long as the later of them. Evaluations, saves and starts are not in it.
    """

    def __init__(self, run: RunRecord) -> None:
        self._iterations, self._hours = [0.0], [0.0]
        world = run.world_size()
        for row in run.metrics:
            iteration, seconds = number(row.get("iteration")), number(row.get("perf/step_time_s"))
            if world is None or iteration is None or seconds is None or iteration <= self._iterations[-1]:
                continue
            self._hours.append(self._hours[-1] + (iteration - self._iterations[-1]) * seconds * world / 3600)
            self._iterations.append(iteration)

    @property
    def total(self) -> float | None:
        """All GPU-hours, None where no step time was recorded."""
        return self._hours[-1] if len(self._hours) > 1 else None

    def hours_at(self, iteration: float) -> float | None:
        """GPU-hours up to the end of an iteration, None behind the last step that was timed."""
        if self.total is None or iteration > self._iterations[-1]:
            return None
        after = bisect_left(self._iterations, iteration)
        if self._iterations[after] == iteration:
            return self._hours[after]
        x0, x1 = self._iterations[after - 1], self._iterations[after]
        y0, y1 = self._hours[after - 1], self._hours[after]
        return y0 + (y1 - y0) * (iteration - x0) / (x1 - x0)


def hours_to(curve: Curve, target: float) -> float | None:
    """GPU-hours at which a curve is first at or below a value, on the straight line between its points; None: never."""
    hours, values = curve.hours or [], curve.values
    if hours and values[0] <= target:
        return hours[0]
    for (x0, y0), (x1, y1) in pairwise(zip(hours, values, strict=False)):
        if y1 <= target:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


def window(points: int) -> int:
    """How many neighbours a curve of so many points is averaged over: an odd number, so that it stays in place."""
    return points // POINTS_A_WINDOW // 2 * 2 + 1


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Centred moving average over ``width`` values; the window shrinks at both ends."""
    half = width // 2
    return [
        sum(part) / len(part)
        for part in (values[max(index - half, 0) : index + half + 1] for index in range(len(values)))
    ]


def thin(count: int, most: int) -> list[int]:
    """At most so many indices of a long list, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def drawn_curves(run: RunRecord) -> dict[str, Any]:
    """What pictures show of a run, as plain values.

    Returns:
        ``train``: lists ``tokens``, ``hours`` (or None), ``kd`` and ``smoothed``; ``heldout``: ``tokens``, ``hours``
        and ``kd``. Longer curves keep ``MOST_POINTS`` points, spread evenly.
    """
    trained, held = training_curve(run), heldout_curve(run)
    keep = thin(len(trained.values), MOST_POINTS)
    smoothed = trained.smooth().values
    return {
        "train": {
            "tokens": [trained.tokens[index] for index in keep],
            "hours": None if trained.hours is None else [trained.hours[index] for index in keep],
            "kd": [trained.values[index] for index in keep],
            "smoothed": [smoothed[index] for index in keep],
        },
        "heldout": {"tokens": held.tokens, "hours": held.hours, "kd": held.values},
    }
