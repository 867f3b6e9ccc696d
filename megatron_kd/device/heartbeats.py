"""Signs of life of all ranks, kept in the store that the job was started through."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TIMEOUT = timedelta(seconds=20)


class Heartbeats:
    """What each rank said last. Used by one thread of a rank, beside whatever collective its main thread hangs in.

    The store is a connection of its own to the first rank (or to the launcher), not a process group: asking who is
    still there needs no answer from who is not.
    """

    def __init__(self) -> None:
        """The default process group is joined."""
        default: Any = dist.distributed_c10d._get_default_store()
        store = default.clone()  # its own connection
        store.set_timeout(_TIMEOUT)
        self._store = dist.PrefixStore("megatron_kd/heartbeats", store)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._count = 0

    def beat(self, state: str) -> None:
        """Says that this rank is alive, and what it does. An unreachable store is no reason to fail."""
        self._count += 1
        try:
            self._store.set(str(self._rank), f"{self._count} {state}")
        except RuntimeError:  # DistStoreError among them: who keeps it has ended or hangs
            return

    def silent(self, every_s: float) -> dict[int, str]:
        """The ranks that say nothing new within three beats, by what they said last.

        Beats itself, since others may be asking at the same time.

        Raises:
            RuntimeError: the store does not answer.
        """
        before = self._all()
        for _ in range(3):
            time.sleep(every_s)
            self.beat("looking for silent ranks")
        after = self._all()
        return {rank: said.partition(" ")[2] for rank, said in after.items() if before.get(rank) == said}

    def _all(self) -> dict[int, str]:
        said = {}
        for rank in range(self._ranks):
            key = str(rank)
            # A key that nobody has set would be waited for.
            said[rank] = self._store.get(key).decode() if self._store.check([key]) else "0 never heard of"
        return said
