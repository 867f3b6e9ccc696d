"""The Dockerfiles, as far as they can be looked at without building them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.assets import ROOT

FILES = ("Dockerfile", "Dockerfile.cpu")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = script("make_requirements")
PINNED = dict(line.split("==") for line in (ROOT / "docker/requirements.txt").read_text().split("\n")[1:-1])


def arguments(name: str) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / name).read_text(), re.MULTILINE))


def test_requirements_are_those_of_pyproject_as_pinned() -> None:
    assert (ROOT / "docker/requirements.txt").read_text() == MAKE.requirements(), "python docker/make_requirements.py"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {MAKE.normal(Requirement(text).name) for text in wanted}
    assert names - set(PINNED) == {"torch", "megatron-core", "numpy"}
    assert PINNED.items() <= MAKE.pins().items()
    for requirement in map(Requirement, wanted):
        assert MAKE.pins()[MAKE.normal(requirement.name)] in requirement.specifier, requirement


def test_nothing_that_torch_brings_is_installed_over_it() -> None:
    assert not {name for name in PINNED if re.match(r"torch|triton|nvidia|cuda|transformer-engine|apex|numpy", name)}
    gpu = (ROOT / "Dockerfile").read_text()
    installs = [line for line in gpu.splitlines() if "pip install" in line]
    assert len(installs) == 3 and all("--no-deps" in line for line in installs)
    assert 'PIP_CONSTRAINT=""' in gpu


@pytest.mark.parametrize("name", FILES)
def test_versions_agree_with_the_constraints(name: str) -> None:
    pins = MAKE.pins()
    given = arguments(name)
    assert given["MEGATRON_CORE_VERSION"] == pins["megatron-core"]
    for key, library in (("TORCH_VERSION", "torch"), ("NUMPY_VERSION", "numpy")):
        assert given.get(key, pins[library]) == pins[library]
    assert re.fullmatch(r"\S+:[\w.-]*\d[\w.-]*", given["BASE"])


@pytest.mark.parametrize("name", FILES)
def test_it_copies_what_there_is_and_leaves_root(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    ignore = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists() and source in ignore, source
    steps = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    assert steps.index("USER") > max(i for i, step in enumerate(steps) if step in ("RUN", "COPY"))
    assert lines[-1] == 'CMD ["megatron-kd", "doctor"]'


def test_nothing_else_is_sent_to_the_build() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = " ".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY "))
    assert lines[0] == "*" and let_in <= set(copied.split())


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", ROOT / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_import_check_refuses_another_torch() -> None:
    check = script("import_check")
    with pytest.raises(SystemExit, match="has installed another one"):
        check.main("2.12.0")
    assert {"megatron_kd.training.loop", "megatron_kd.doctor.job", "megatron_kd.cli.commands"} <= set(check.modules())
