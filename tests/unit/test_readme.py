"""What the README tells people to type exists, and what it shows as a recipe loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from megatron_kd.cli import app
from megatron_kd.config import load_recipe
from tests.assets import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LINES = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "" for line in text.splitlines()]
COMMANDS = [line[line.index("megatron-kd ") :] for line in LINES if "megatron-kd " in line]


def test_the_readme_names_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_and_take_what_is_shown(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    assert isinstance(command, TyperGroup)
    while isinstance(command, TyperGroup):
        name = words.pop(0)
        assert name in command.commands, f"{line}: there is no command {name}"
        command = command.commands[name]
    for word in words:
        if word.startswith("--"):
            assert any(word.split("=")[0] in parameter.opts for parameter in command.params), (
                f"{line}: no option {word}"
            )
        elif word.endswith(".yaml"):
            assert (ROOT / word).exists(), f"{line}: no file {word}"
            load_recipe(ROOT / word, [w for w in words if "=" in w])


def test_the_snippet_runs() -> None:
    [snippet] = [text for kind, text in BLOCKS if kind == "python"]
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["hidden"].grad is not None and names["weight"].grad is not None


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in LINES:
        if line.startswith("make "):
            assert line.split()[1] in targets, line


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_recipe_shown_is_the_demo_s(tmp_path: Path) -> None:
    [shown] = [text for kind, text in BLOCKS if kind == "yaml"]
    path = tmp_path / "recipe.yaml"
    path.write_text(shown.replace("../configs", str(ROOT / "configs")))
    parsed = yaml.safe_load(shown)
    demo = load_recipe(ROOT / "recipes/smollm2_cpu.yaml", []).model_dump()
    loaded = load_recipe(path, []).model_dump()
    for section, values in parsed.items():
        if section != "extends":
            assert loaded[section] == demo[section] or isinstance(values, dict), section
            for key in values if isinstance(values, dict) else ():
                assert loaded[section][key] == demo[section][key], f"{section}.{key}"
