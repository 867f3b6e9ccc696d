"""What the README tells people to type exists, and what it shows as a recipe loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_kd.config import load_recipe
from tests.assets import ROOT
from tests.unit.typed_commands import blocks, check_command, commands, lines

README = (ROOT / "README.md").read_text()
COMMANDS = commands(README)


def test_the_readme_names_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_and_take_what_is_shown(line: str) -> None:
    check_command(line)


def test_the_snippet_runs() -> None:
    [snippet] = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["hidden"].grad is not None and names["weight"].grad is not None


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in lines(README):
        if line.startswith("make "):
            assert line.split()[1] in targets, line


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_recipe_shown_is_the_demo_s(tmp_path: Path) -> None:
    [shown] = blocks(README, "yaml")
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
