"""Who is there: the ranks meet in a key-value store before any collective, so that one who is missing has a name.

The store lives in the first rank's process, or in torchrun's. Nothing here waits longer than it says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_kd.errors import RemoteRankError

_POLL_S = 0.05
_TAKE_LEAVE_S = 5.0


@dataclass(frozen=True)
class Seat:
    """One rank as it introduced itself."""

    rank: int
    local_rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Meeting:
    """The store that all ranks see, and what they tell each other by it.

    Attributes:
        store: to be shared with process groups.
        seats: those who answered the roll call, by rank.
    """

    def __init__(self, node: str, timeout: float) -> None:
        """Connects, with the addresses that a launcher has put into the environment.

        Args:
            timeout: seconds that any one wait may last.

        Raises:
            RemoteRankError: the first rank does not answer.
        """
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.timeout = timeout
        self.seats: dict[int, Seat] = {}
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's agent keeps a store of its own at that address.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store: dist.Store = dist.TCPStore(
                host,
                port,
                is_master=self.rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            if "EADDRINUSE" in first:
                raise RemoteRankError(
                    f"rank {self.rank} on {node} cannot listen at {host}:{port}: another program does; "
                    "set MASTER_PORT to a port that is free there"
                ) from error
            raise RemoteRankError(
                f"rank {self.rank} on {node} cannot reach rank 0 at {host}:{port} within {timeout:.0f} s ({first}): "
                "see whether rank 0 runs, whether MASTER_ADDR is its address, and whether a firewall stands between"
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"megatron-kd-doctor/{attempt}", store)
        self._put("seat", {"local_rank": int(os.environ.get("LOCAL_RANK", "0")), "node": node, "pid": os.getpid()})

    def call_roll(self) -> list[int]:
        """Waits for all ranks to introduce themselves; returns those that did not. Called by every rank."""
        told = self.collect("seat", range(self.world))
        self.seats = {rank: Seat(rank, **seat) for rank, seat in sorted(told.items())}
        # What the first rank saw is what counts.
        if self.rank == 0:
            self._put("roll", sorted(told))
        present = self._get("roll", 0)
        self.seats = {rank: seat for rank, seat in self.seats.items() if rank in present}
        return sorted(set(range(self.world)) - set(present))

    def tell(self, what: str, value: Any) -> None:
        """Leaves this rank's word, any JSON, for ``collect``."""
        self._put(what, value)

    def collect(self, what: str, ranks: Iterable[int], patience: float | None = None) -> dict[int, Any]:
        """The words of some ranks; those that say nothing in time are left out.

        Raises:
            RemoteRankError: the store is gone.
        """
        waiting, told = set(ranks), dict[int, Any]()
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        while waiting:
            for rank in sorted(waiting):
                with _answering(0):
                    if self.store.check([f"{what}/{rank}"]):
                        told[rank] = json.loads(self.store.get(f"{what}/{rank}"))
            waiting -= set(told)
            if time.monotonic() > deadline:
                break
            if waiting:
                time.sleep(_POLL_S)
        return told

    def hear_first(self, what: str, patience: float) -> Any:
        """What the first rank has told. Raises RemoteRankError where it says nothing for ``patience`` seconds."""
        return self._get(what, 0, patience)

    def take_leave(self) -> None:
        """The first rank keeps the store until the others have gone, a little while at most."""
        if self.rank:
            self._put("bye", True)
            return
        self.collect("bye", (rank for rank in self.seats if rank), _TAKE_LEAVE_S)

    def together[T](self, stage: str, do: Callable[[], T]) -> T:
        """Calls what all ranks take part in, once all have come to it.

        Raises:
            RemoteRankError: naming the ranks that did not come, or did not come out of it.
            Exception: what ``do`` raised.
        """
        self._put(f"{stage}/begins", True)
        self._require(f"{stage}/begins", f"did not come to the {stage}")
        try:
            result = do()
        except Exception:
            self._put(f"{stage}/ends", False)
            raise
        self._put(f"{stage}/ends", True)
        return result

    def agreed(self, stage: str) -> bool:
        """Whether all ranks came out of a stage well; the first rank's answer on all."""
        if self.rank == 0:
            told = self.collect(f"{stage}/ends", self.seats)
            self._put(f"{stage}/agreed", len(told) == len(self.seats) and all(told.values()))
        return bool(self._get(f"{stage}/agreed", 0, 6 * self.timeout))

    def absent(self, stage: str) -> list[str]:
        """The ranks that have not come out of a stage; asked after it failed here."""
        told = self.collect(f"{stage}/ends", self.seats)
        return [str(seat) for rank, seat in self.seats.items() if rank not in told]

    def _require(self, what: str, otherwise: str) -> None:
        told = self.collect(what, self.seats)
        late = [str(seat) for rank, seat in self.seats.items() if rank not in told]
        if late:
            raise RemoteRankError(f"{', '.join(late)} {otherwise} within {self.timeout:.0f} s")

    def _put(self, what: str, value: Any) -> None:
        with _answering(0):
            self.store.set(f"{what}/{self.rank}", json.dumps(value))

    def _get(self, what: str, rank: int, patience: float | None = None) -> Any:
        limit = timedelta(seconds=2 * self.timeout if patience is None else patience)
        with _answering(rank):
            self.store.wait([f"{what}/{rank}"], limit)
            return json.loads(self.store.get(f"{what}/{rank}"))


@contextmanager
def _answering(rank: int) -> Iterator[None]:
    """A store that is gone is the first rank's end; one that waits in vain, that of the rank it waits for."""
    try:
        yield
    except RuntimeError as error:
        raise RemoteRankError(f"rank {rank} no longer answers ({str(error).splitlines()[0]})") from error
