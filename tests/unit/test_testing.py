"""The harness for tests with several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_kd.device import any_rank, fail_together
from megatron_kd.errors import CacheError, RemoteRankError
from megatron_kd.testing import RankFailedError, run_distributed


def sums_rank(rank: int, world: int, offset: int) -> tuple[int, float, dict[str, str | None], list[str]]:
    """A collective, the environment, and what fail_together makes of errors on one rank."""
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    seen = []
    for error in (CacheError("torn"), OSError("full"), KeyError("k"), RuntimeError("odd"), None):
        try:
            with fail_together("writing"):
                if rank == 1 and error is not None:
                    raise error
            seen.append("fine")
        except Exception as caught:
            seen.append(f"{type(caught).__name__}: {caught}")
    assert any_rank(rank == 0) and not any_rank(False)
    return rank, float(value), {name: os.environ.get(name) for name in names}, seen


def test_ranks_answer_in_order_and_fail_together() -> None:
    results: list[Any] = run_distributed(sums_rank, 2, 10)
    assert [(rank, total) for rank, total, _, _ in results] == [(0, 21.0), (1, 21.0)]
    assert results[1][2] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    remote = "RemoteRankError: writing failed on another rank; its message says why"
    assert results[0][3] == [remote] * 4 + ["fine"]
    assert results[1][3] == ["CacheError: torn", "OSError: full", "KeyError: 'k'", "RuntimeError: odd", "fine"]


def dying_rank(rank: int, world: int, folder: str) -> str:
    """Rank 1 starts a helper and dies without a word; rank 0 waits for it."""
    if rank == 1:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        Path(folder, "helper").write_text(str(helper.pid))
        os._exit(7)
    try:
        with fail_together("waiting"):
            pass
    except RemoteRankError as error:
        Path(folder, "error").write_text(str(error))
        raise
    return "unreachable"


def test_a_rank_that_dies_fails_the_others_and_leaves_nothing_behind(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError) as raised:
        run_distributed(dying_rank, 2, str(tmp_path), timeout_s=60.0)
    assert time.monotonic() - started < 40
    assert "rank 1 of 2 died with exit code 7" in str(raised.value)
    assert "a rank of this job died or no longer answers" in (tmp_path / "error").read_text()
    assert not _runs(int((tmp_path / "helper").read_text()))


def _runs(pid: int) -> bool:
    """Whether a process lives; one that was killed and not yet reaped does not."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def stuck_rank(rank: int, world: int) -> None:
    """Never ends."""
    time.sleep(300)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RankFailedError, match="rank 0 of 1 was still running"):
        run_distributed(stuck_rank, 1, timeout_s=6.0)
