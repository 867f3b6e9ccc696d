"""The tiny recipe walked up to its cache, once for all tests of a process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.assets import succeed, tiny_recipe
from tests.warm import warm


@functools.cache
def captured_road() -> Path:
    """A folder with ``recipe.yaml``, ``teacher``, ``samples`` and ``cache``. Tests change copies of these only."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-kd-road-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    recipe = tiny_recipe(folder)
    succeed(warm("convert", "import", recipe))
    succeed(warm("prepare", recipe))
    succeed(warm("capture", recipe))
    return folder


def files_below(folder: Path) -> list[str]:
    """Relative names of all files below a folder, sorted; empty where there is none."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def one_error_line(done: Any, *words: str) -> str:
    """Asserts that a command failed as users are promised, with all the words in its message, and returns that line.

    Progress of work done before may stand above the line; a traceback may not.
    """
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron-kd: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0] == done.stderr.splitlines()[-1]
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"
    return lines[0]
