"""The private SLURM cluster as tests see it: jobs are submitted, waited for, signalled, and their logs read."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.assets import ROOT, environment

CONTROL = Path(__file__).with_name("cluster.sh")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATIENCE_S = 180.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"no {', '.join(absent)} here: make slurm-deps"
    return "" if os.geteuid() == 0 else "a private SLURM cluster needs root"


def wait_until(ready: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Looks again and again until it is so."""
    deadline = time.monotonic() + patience_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s:.0f} s"
        time.sleep(0.05)


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    number: str

    @property
    def facts(self) -> dict[str, str]:
        """What scontrol knows of it."""
        words = self.cluster.run("scontrol", "show", "job", "-o", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def output(self) -> Path:
        """The file that it prints to; of a task of an array known when it has started."""
        return Path(self.facts["StdOut"])

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def signal(self, name: str, *options: str) -> None:
        """A signal by scancel."""
        self.cluster.run("scancel", f"--signal={name}", *options, self.number)

    def ended(self, patience_s: float = PATIENCE_S) -> tuple[str, int]:
        """Waits for its end: state and exit status."""
        try:
            wait_until(lambda: self.facts["JobState"] in ENDED, f"the end of job {self.number}", patience_s)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.facts}\n{self.log}") from None
        facts = self.facts
        return facts["JobState"], int(facts["ExitCode"].split(":")[0])

    def one_error(self, *words: str) -> str:
        """Asserts that it ended with status 2 and one line of error with all the words, beside srun's own."""
        assert self.ended() == ("FAILED", 2), self.log
        lines = [line for line in self.log.splitlines() if "error:" in line and not line.startswith("srun: ")]
        assert len(lines) == 1, self.log
        absent = [word for word in words if word not in lines[0]]
        assert not absent, f"{absent} not in: {lines[0]}"
        return lines[0]


class Cluster:
    """Two nodes and a spare that is down, each with eight GPUs that are none; jobs start in ``folder``."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.folder = home, folder
        self.environment = {
            **environment(),
            "SLURM_CONF": str(home / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "KD_ROOT": str(ROOT),
            "KD_VENV": os.environ.get("VIRTUAL_ENV", str(ROOT / ".venv")),
        }

    def control(self, action: str, *arguments: str) -> None:
        """cluster.sh: start, stop, lose, restore."""
        subprocess.run(
            ["bash", CONTROL, action, self.home, *arguments],
            check=True,
            env=self.environment,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
        """A program, with its output; it must succeed."""
        done = subprocess.run(
            list(map(str, arguments)),
            cwd=self.folder,
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self,
        script: str,
        *arguments: str | Path,
        options: tuple[str, ...] = ("--nodes=2",),
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """sbatch with a script of launch/, on both nodes unless the options say otherwise."""
        sbatch = ("sbatch", "--parsable", "--gpus-per-node=0", *options, ROOT / "launch" / script, *arguments)
        number = self.run(*sbatch, env=env).strip()
        return Job(self, number)

    def ranks(self, node: str) -> list[int]:
        """Process ids of the ranks on a node, or on all whose names begin so."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            ours = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode() in variables and state != "Z"
            if ours and any(v.startswith(f"SLURMD_NODENAME={node}".encode()) for v in variables):
                pids += [int(folder.name)] if any(v.startswith(b"RANK=") for v in variables) else []
        return pids
