"""What documentation tells people to type: found in its blocks, compared with the command's own parser."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from megatron_kd.cli import app
from megatron_kd.config import load_recipe
from megatron_kd.config.sweep import load_sweep
from tests.assets import ROOT

SCRIPT = re.compile(r"\blaunch/[a-z0-9_]+\.sh")


def blocks(text: str, kind: str = "") -> list[str]:
    """The contents of all fenced blocks of a kind."""
    return [
        body for fence, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if fence == kind
    ]


def lines(text: str) -> list[str]:
    """The lines of the plain blocks, without comments."""
    return [line.split("#")[0].strip() for block in blocks(text) for line in block.splitlines()]


def commands(text: str) -> list[str]:
    """The lines that call megatron-kd, from that word on."""
    calls = [line for line in lines(text) if "megatron-kd " in line and not line.startswith("docker build")]
    return [line[line.index("megatron-kd ") :] for line in calls]


def check_command(line: str, written: tuple[str, ...] = ()) -> None:
    """Asserts that the command exists, takes its options, and that its recipe loads with the overrides.

    Args:
        written: recipes that the page has its reader write.
    """
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while isinstance(command, TyperGroup):
        name = words.pop(0)
        assert name in command.commands, f"{line}: there is no command {name}"
        command = command.commands[name]
    for word in words:
        if word.startswith("--"):
            known = any(word.split("=")[0] in parameter.opts for parameter in command.params)
            assert known, f"{line}: no option {word}"
    if command.name == "sweep":
        check_sweep(words)
        return
    for word in words:
        if not word.startswith("--") and word.endswith(".yaml") and word not in written:
            check_recipe(word, words, trains=command.name != "capture")


def check_recipe(recipe: str, words: list[str], *, trains: bool = True) -> None:
    """Asserts that a recipe is there and loads with those of the words that are overrides."""
    assert (ROOT / recipe).exists(), f"no file {recipe}"
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    load_recipe(ROOT / recipe, overrides, trains=trains)


def check_sweep(words: list[str]) -> None:
    """Asserts that all points of a sweep load, on another base where one is named last, and that it has the named."""
    file, *base = [word.removeprefix("--base=") for word in words if word.endswith(".yaml")]
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    sweep = load_sweep(ROOT / file, overrides, base=ROOT / base[0] if base else None)
    only = [after for word, after in pairwise(words) if word == "--only"]
    assert set(only) <= {point.name for point in sweep.points}


def default_recipe(script: str) -> str:
    """The recipe that a job script takes where none is named; empty where it has none."""
    found = re.search(r"^KD_RECIPE=\$\{KD_RECIPE:-(.*)\}$", (ROOT / script).read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def check_script(line: str, written: tuple[str, ...] = ()) -> None:
    """Asserts the same of a line that starts a script of launch/, whose recipe may be its own."""
    words = shlex.split(line)
    place = next(i for i, word in enumerate(words) if SCRIPT.fullmatch(word))
    script, rest = words[place], words[place + 1 :]
    assert (ROOT / script).is_file(), f"{line}: no {script}"
    if script == "launch/sweep.sh":
        check_sweep(rest)
        return
    named = [word for word in rest if word.endswith(".yaml") and "=" not in word]
    assert len(named) <= 1, line
    recipe = named[0] if named else default_recipe(script)
    if recipe and recipe not in written:
        check_recipe(recipe, rest, trains="capture" not in rest)


def pages() -> list[Path]:
    """The documentation for people who use the project."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
