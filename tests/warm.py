"""Runs many ``megatron-kd`` commands for the price of one import of Megatron-Core.

``warm(...)`` starts the command in a child forked from a server process that has imported everything and started
nothing: arguments, environment, standard streams, exit status and signals are those of a process of its own. What a
cold start prints, and torchrun itself, are tested with ``assets.megatron_kd``.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.assets import ROOT, environment

_server: subprocess.Popen[str] | None = None


@dataclass(frozen=True)
class Started:
    """A command that runs: one process id for each rank, and the files it prints to."""

    arguments: tuple[str, ...]
    pids: list[int]
    folder: tempfile.TemporaryDirectory[str]

    def wait(self, timeout: float = 120.0) -> list[subprocess.CompletedProcess[str]]:
        """What each rank printed and its exit status (negative: the signal); all are killed after the timeout."""
        deadline = time.monotonic() + timeout
        codes = [int(_ask({"wait": pid, "timeout": max(deadline - time.monotonic(), 0.0)})) for pid in self.pids]
        read = Path(self.folder.name).joinpath
        done = [
            subprocess.CompletedProcess(
                self.arguments, code, read(f"{rank}.out").read_text(), read(f"{rank}.err").read_text()
            )
            for rank, code in enumerate(codes)
        ]
        self.folder.cleanup()
        return done


def warm(*arguments: str | Path, timeout: float = 120.0, env: Mapping[str, str] | None = None) -> Any:
    """Runs a command on one rank to its end; ``env`` is added to the test environment."""
    (done,) = start(*arguments, env=env).wait(timeout)
    return done


def start(*arguments: str | Path, ranks: int = 1, env: Mapping[str, str] | None = None) -> Started:
    """Starts a command. With more than one rank, or RANK in ``env``, the ranks find each other as under torchrun."""
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory()
    texts = tuple(map(str, arguments))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        variables = {**environment(), **(env or {})}
        if ranks > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for stream in ("out", "err"):
            (Path(folder.name) / f"{rank}.{stream}").touch()  # a command may be killed before it opens them
        request = {"argv": texts, "env": variables, "streams": f"{folder.name}/{rank}"}
        pids.append(int(_ask(request)))
    return Started(texts, pids, folder)


def _ask(request: Mapping[str, Any]) -> Any:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_server.terminate)
    assert _server.stdin is not None and _server.stdout is not None
    print(json.dumps(request), file=_server.stdin, flush=True)
    answer = _server.stdout.readline()
    assert answer, "the server of warm commands died"
    return json.loads(answer)


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                _become_the_command(request)
        print(json.dumps(answer), file=answers, flush=True)


def _wait(pid: int, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.01)


def _become_the_command(request: dict[str, Any]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['streams']}.{suffix}", os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["megatron-kd", *request["argv"]]
    status = 1
    try:
        from megatron_kd.cli import main

        main()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as at the end of any interpreter; a fork must not return into the server
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    from megatron_kd import cli  # noqa: F401
    from megatron_kd.console import quiet_libraries

    quiet_libraries()
    for package in ("transformers.models.auto.tokenization_auto", "wandb", "matplotlib.figure"):
        importlib.import_module(package)  # they are slow to import, and the command imports them late

    import megatron_kd.cache.inspect
    import megatron_kd.cache.verify
    import megatron_kd.data.prepare
    import megatron_kd.report
    import megatron_kd.training.evaluation_job
    import megatron_kd.training.loop  # noqa: F401

    _serve(sys.stdin, sys.stdout)
