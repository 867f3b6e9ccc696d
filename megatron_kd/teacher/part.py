"""Which share of a capture's work one of several jobs takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_kd.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Part ``index`` of ``count``, counted from 1 as in ``sbatch --array=1-8``. Parts of one count are disjoint."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From ``2/8``. Raises ConfigError for anything but a number, a slash, and a number no less than the first."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        if match is None:
            raise ConfigError(f"--part is {text!r}: write which part of how many, such as 2/8")
        index, count = int(match[1]), int(match[2])
        if not 1 <= index <= count:
            raise ConfigError(
                f"--part is {text!r}, but parts are counted from 1 to {count}: for an array of jobs submit "
                "with --array=1-N, so that SLURM_ARRAY_TASK_ID counts from 1 as well"
            )
        return cls(index, count)

    def shards(self, total: int) -> range:
        """The shards of this part, out of ``total``: a run of neighbours, empty where there are more parts than shards.

        The sizes of two parts differ by one shard at most, and all parts together are all shards.
        """
        return range((self.index - 1) * total // self.count, self.index * total // self.count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Part(1, 1)
