"""The state of a job in a small file, for scripts that must know whether its work is done.

``{"state": "running" | "stopped" | "finished" | "failed", …}``: stopped by a signal, with status 0 and work left. A job
that was killed had no time to say so and is running for ever; whoever started it knows better.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_kd.files import write_json


def has_begun(run_dir: Path) -> bool:
    """Whether a run directory holds steps or checkpoints."""
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("iter_*")) or (metrics.exists() and metrics.stat().st_size > 0)


class JobStatus:
    """Writes the file, each time whole; on ranks that do not speak for the job, nothing."""

    def __init__(self, path: Path | None, **figures: Any) -> None:
        """``figures``: what stands in the file beside the state."""
        self._path, self._figures = path, figures
        self._ended: bool | None = None
        self.begun = False

    def begin(self) -> None:
        """The job is running. Raises OSError, as all of this does, where the file cannot be written."""
        self.begun = True
        self._write("running")

    def update(self, **figures: Any) -> None:
        """Other figures beside the state of a job that has begun."""
        self._figures |= figures
        if self.begun:
            self._write("running")

    def fails(self) -> None:
        """The process is about to end without leaving this."""
        if self.begun:
            self._write("failed")

    def ends(self, *, finished: bool) -> None:
        """How the job will have ended when this is left without an error."""
        self._ended = finished

    def __enter__(self) -> JobStatus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes how the job ended; a failure only where it had begun: what was finished before stays so."""
        if error is not None:
            if self.begun:
                with suppress(OSError):  # the same full disk, as a rule; what failed first is the better message
                    self._write("failed")
        elif self._ended is not None:
            self._write("finished" if self._ended else "stopped")

    def _write(self, state: str) -> None:
        if self._path is not None:
            write_json(self._path, {"state": state, **self._figures})
