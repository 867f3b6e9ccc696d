"""Metrics of a run: ``metrics.jsonl`` is the source of truth, wandb a view, the terminal a glance."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_kd.config import Recipe
from megatron_kd.training.wandb_view import WandbView

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes the metrics of the first rank. Made on other ranks with ``enabled=False``, it does nothing.

    Attributes:
        failure: why a line could not be written, else None. No line is written after it: the loop ends all ranks
            where they can agree on it.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, *, enabled: bool) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.failure: OSError | None = None
        self._unwritten: bytes | None = None
        self._evaluated = _evaluated(self.path) if enabled else set()
        self._file = open(self.path, "ab", buffering=0) if enabled else None  # noqa: SIM115
        self._wandb = WandbView(recipe, run_dir) if enabled and recipe.logging.wandb is not None else None

    def write(self, iteration: int, tokens: int, samples: int, metrics: dict[str, float]) -> None:
        """One line: the position of the run, then the metrics. The system has it when this returns."""
        if self._file is None or self.failure is not None:
            return
        record: dict[str, Any] = {"iteration": iteration, "tokens": tokens, "samples": samples, **metrics}
        self._append(self._file, (json.dumps(record) + "\n").encode())
        if self._wandb is not None:
            self._wandb.log(record)

    def _append(self, file: FileIO, line: bytes) -> None:
        """The whole line or, on a full disk, nothing of it."""
        size, rest = file.seek(0, os.SEEK_END), line
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            error.filename = str(self.path)
            self.failure, self._unwritten = error, line
            with suppress(OSError):
                file.truncate(size)

    def write_evaluation(self, iteration: int, tokens: int, samples: int, metrics: dict[str, float]) -> None:
        """A line of its own for an evaluation; one that stands there already is not written again."""
        if iteration not in self._evaluated:
            self._evaluated.add(iteration)
            self.write(iteration, tokens, samples, metrics)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            if self._unwritten is not None:
                self._append(self._file, self._unwritten)  # its step is saved where there is room again
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(failed=kind is not None)


def _evaluated(path: Path) -> set[int]:
    """The iterations whose evaluation stands in the file."""
    if not path.exists():
        return set()
    records = (json.loads(line) for line in path.read_text().splitlines())
    return {record["iteration"] for record in records if "eval/kd" in record}
