"""Which steps are not taken: those whose loss or gradient is not finite, and those whose loss jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_kd.config import TrainingConfig
from megatron_kd.errors import KDError


@dataclass(frozen=True)
class Fault:
    """Why a step is not taken.

    Attributes:
        reason: in words.
        finite: False where loss or gradient is NaN or infinite.
    """

    reason: str
    finite: bool


class DivergedError(KDError):
    """A step that must not be taken, at which the run ends; the weights are those before it."""


@dataclass
class Guard:
    """What is known of earlier steps; part of every checkpoint, so that a resumed run judges as it would have.

    Attributes:
        skipped_steps: since the beginning of the run.
        skipped_in_a_row: up to now.
        recent: mean losses of the last steps that were taken, oldest first.
    """

    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    recent: list[float] = field(default_factory=list)

    def fault(self, policy: TrainingConfig, loss: float, norm: float) -> Fault | None:
        """What is wrong with a step; None where it may be taken.

        Args:
            loss: mean over the unmasked tokens of the global batch.
            norm: of the gradient of the whole model.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Fault(f"loss {loss:.6g}, gradient norm {norm:.6g}", finite=False)
        limit = self.spike_limit(policy)
        if loss > limit:
            return Fault(
                f"loss {loss:.6g} is more than training.loss_spike_factor {policy.loss_spike_factor:g} × "
                f"{median(self.recent):.6g}, the median of the last {len(self.recent)} steps taken",
                finite=True,
            )
        return None

    def spike_limit(self, policy: TrainingConfig) -> float:
        """The highest loss that is no spike; infinite until a whole window of steps is known."""
        if policy.loss_spike_factor is None or len(self.recent) < policy.loss_spike_window:
            return math.inf
        return policy.loss_spike_factor * median(self.recent)

    def taken(self, policy: TrainingConfig, loss: float) -> None:
        """Remembers a step."""
        self.skipped_in_a_row = 0
        self.recent = [*self.recent, loss][-policy.loss_spike_window :]

    def skip(self, policy: TrainingConfig, where: str, fault: Fault) -> None:
        """Counts a step that is not taken.

        Args:
            where: the iteration and its rows, for the message.

        Raises:
            DivergedError: the run is to end here; nothing is counted then, since a resumed run tries the step again.
        """
        if policy.on_nonfinite == "stop" and not fault.finite:
            raise DivergedError(
                f"{where}: {fault.reason}; the step was not taken, the weights before it are kept: look at its rows, "
                "set training.on_nonfinite=skip to go on without them, or lower optimizer.lr; where the next start "
                "ends here again, remove the newest checkpoints"
            )
        if self.skipped_in_a_row >= policy.max_skipped_steps:
            raise DivergedError(
                f"{where}: {fault.reason}; {self.skipped_in_a_row} steps before it were skipped, as many in a row as "
                "training.max_skipped_steps allows, and the weights before them are kept: lower optimizer.lr, or go "
                "back to an older checkpoint"
            )
        self.skipped_steps += 1
        self.skipped_in_a_row += 1

    def state(self) -> dict[str, Any]:
        """For ``progress.json``; floats survive JSON bit by bit."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "recent_losses": self.recent,
        }

    @staticmethod
    def of(state: Mapping[str, Any]) -> Guard:
        """From ``progress.json``; of a checkpoint written before there was a guard, a new one."""
        return Guard(
            state.get("skipped_steps", 0), state.get("skipped_in_a_row", 0), list(state.get("recent_losses", []))
        )
