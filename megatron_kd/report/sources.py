"""From what a user names to runs: run directories, wandb's offline folders, addresses on a wandb server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.errors import KDError
from megatron_kd.report.runs import METRICS, RECIPE, RunRecord, read_run
from megatron_kd.report.wandb_offline import offline_folders, read_offline, run_id, start_of
from megatron_kd.report.wandb_server import is_address, read_from_server


@dataclass(frozen=True)
class Source:
    """One run, before it is read.

    Attributes:
        given: the argument that named it.
        place: the run directory, the id of a wandb run with its folders, or the address.
    """

    given: str
    place: str
    folders: tuple[Path, ...] = ()

    def read(self) -> RunRecord:
        """The run. Raises KDError where it cannot be read."""
        if is_address(self.place):
            return read_from_server(self.place)
        return read_offline(self.folders) if self.folders else read_run(self.place)


def find_runs(arguments: Sequence[str | Path]) -> list[Source]:
    """What the arguments name, in their order.

    A folder of wandb within a run directory stands for that run directory, whose own metrics are the source of truth.
    Folders that wandb wrote for one run across restarts are one run.

    Raises:
        KDError: when nothing is given, an argument names no run, or a run is named twice.
    """
    if not arguments:
        raise KDError("nothing to compare: give at least one run directory")
    found: dict[str, Source] = {}
    for argument in map(str, arguments):
        for key, source in _named_by(argument):
            before = found.get(key)
            if before is None:
                found[key] = source
            elif source.folders and before.folders and not _places(source) & _places(before):
                joined = tuple(sorted((*before.folders, *source.folders), key=start_of))
                found[key] = Source(before.given, before.place, joined)
            elif not (_within_wandb(argument) and _within_wandb(before.given) and argument != before.given):
                raise KDError(f"{argument}: given twice: name each run once")
    return list(found.values())


def _named_by(argument: str) -> list[tuple[str, Source]]:
    """The runs that one argument names, each with what tells it from all others."""
    if is_address(argument):
        return [(argument.rstrip("/"), Source(argument, argument))]
    path = Path(argument)
    if _is_run(path):
        return [(str(path.resolve()), Source(argument, argument))]
    folders = offline_folders(path)
    if not folders:
        read_run(path)  # says what is wrong with it
        raise KDError(f"{argument}: not a run directory")
    found: dict[str, Source] = {}
    for folder in folders:
        owner = folder.resolve().parent.parent
        if _is_run(owner) and (owner / METRICS).is_file():
            found[str(owner)] = Source(argument, _as_given(owner))
        else:
            identity = run_id(folder)
            before = found[identity].folders if identity in found else ()
            found[identity] = Source(argument, str(folder), (*before, folder))
    return list(found.items())


def _places(source: Source) -> set[Path]:
    return {folder.resolve() for folder in source.folders}


def _is_run(path: Path) -> bool:
    return (path / RECIPE).is_file() or (path / METRICS).is_file()


def _within_wandb(argument: str) -> bool:
    """Whether an argument names folders of wandb: a pattern of the shell names all those of one run."""
    return not is_address(argument) and not _is_run(Path(argument))


def _as_given(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)
