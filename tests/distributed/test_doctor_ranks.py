"""Doctor: ranks that stay away, fail or hang on the way have a name, and nobody waits for them for long."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron_kd.doctor.check import NoAnswerError, within
from megatron_kd.doctor.roll_call import Meeting
from megatron_kd.errors import RemoteRankError
from megatron_kd.testing import run_distributed

TIMEOUT = 1.5


def meet(rank: int, world: int, port: int) -> dict[str, Any]:
    """Three ranks on two nodes go through four stages, in each of which the last one does something else."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    meeting = Meeting(f"n{rank // 2}", 60.0)
    assert meeting.call_roll() == []
    meeting.timeout = TIMEOUT
    seen: dict[str, Any] = {"seats": [str(seat) for seat in meeting.seats.values()]}
    seen["well"] = meeting.together("first", lambda: 7), meeting.agreed("first")

    def fails() -> None:
        if rank == 2:
            raise ValueError("no memory")

    try:
        meeting.together("second", fails)
    except ValueError as error:
        seen["own"] = str(error)
    seen["second"] = meeting.agreed("second")
    start = time.monotonic()
    if rank == 2:
        time.sleep(3 * TIMEOUT)
    else:
        with pytest.raises(RemoteRankError) as late:
            meeting.together("third", lambda: None)
        seen["late"] = str(late.value)
    seen["waited"] = time.monotonic() - start
    meeting.tell("ready", True)
    meeting.collect("ready", meeting.seats, 60.0)
    if rank == 2:
        with pytest.raises(NoAnswerError):
            within(0.2, lambda: meeting.together("fourth", lambda: time.sleep(60)))
    else:
        meeting.together("fourth", lambda: None)
        seen["stuck"] = meeting.absent("fourth")
    meeting.tell("verdict", True)
    meeting.hear_first("verdict", 60.0)
    meeting.take_leave()
    return seen


def test_ranks_that_stay_behind_are_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_distributed(meet, 3, port)
    for rank, seen in enumerate(found):
        assert seen["seats"] == ["rank 0 on n0", "rank 1 on n0", "rank 2 on n1"]
        assert seen["well"] == (7, True) and seen["second"] is False
        assert seen.get("own") == ("no memory" if rank == 2 else None)
    for seen in found[:2]:
        assert seen["late"] == "rank 2 on n1 did not come to the third within 2 s"
        assert TIMEOUT <= seen["waited"] < 3 * TIMEOUT
        assert seen["stuck"] == ["rank 2 on n1"]


def test_a_port_in_use_and_a_store_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RemoteRankError, match=f"n1 cannot listen at 127.0.0.1:{port}: another program does"):
            Meeting("n1", TIMEOUT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    meeting = Meeting("n2", TIMEOUT)
    del store  # its server ends with it
    with pytest.raises(RemoteRankError, match="rank 0 no longer answers"):
        meeting.call_roll()
    with pytest.raises(RemoteRankError, match="rank 0 no longer answers"):
        meeting.tell("word", 1)
