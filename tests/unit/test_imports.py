"""The rooms of the package: imports go downwards only, and only device/ knows about CUDA. Read from the source text."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_kd"

ORDER = [
    "cli",
    "sweep",
    "report",
    "bench",
    "doctor",
    "planning",
    "training",
    "teacher",
    "models",
    "data",
    "cache",
    "losses",
    "targets",
    "config",
    "device",
]
"""From the top down: a room may import those that stand behind it."""
GROUND = {"console", "daemons", "errors", "files", "pictures", "progress", "status", "testing", "versions"}
"""Below all rooms; they import nothing of the package but each other."""
FORBIDDEN = {
    "config": ["torch", "megatron", "transformers", "numpy", "megatron_kd.testing"],
    "report": ["torch", "megatron", "transformers"],
    "cache": ["torch.distributed", "megatron"],
    "errors": ["torch", "megatron"],
    "files": ["torch", "megatron"],
    "progress": ["torch", "megatron"],
}
"""Modules that a room must not import anywhere, within a function neither."""
LOSSES_MAY = {"torch", "triton", "megatron_kd"}
"""All that losses/ imports besides the standard library, so that others can lift it out."""
CUDA_ALLOWED: dict[str, int] = {}
"""Uses of CUDA outside device/, by file: numbers here may only fall."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of a dotted module name; the package itself counts as ground, its entry point as the command line."""
    parts = module.split(".")
    if len(parts) == 1:
        return ""
    return "cli" if parts[1] == "__main__" else parts[1]


def module_of(path: Path) -> str:
    parts = ("megatron_kd", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Every module that a source imports, at the top or within a function, as (line, absolute dotted name).

    ``from a import b`` counts as ``a.b``: b may be a module.

    Args:
        package: the package that the source is in, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def is_within(module: str, root: str) -> bool:
    return module == root or module.startswith(f"{root}.")


def wrong_imports(text: str, module: str, package: str) -> list[str]:
    """What is wrong with the imports of one source, as "line: reason"."""
    here, wrong = room_of(module), []
    for line, name in imports(ast.parse(text), package):
        wrong += [f"{line}: {here} imports {name}" for bad in FORBIDDEN.get(here, []) if is_within(name, bad)]
        top = name.split(".")[0]
        if here == "losses" and top not in LOSSES_MAY and top not in sys.stdlib_module_names:
            wrong.append(f"{line}: losses imports {name}; it may use {', '.join(sorted(LOSSES_MAY))}")
        if top != "megatron_kd":
            continue
        there = room_of(name)
        if there == here or there not in {*ORDER, *GROUND}:
            continue  # itself, or a name of the package's own __init__ such as the version
        if here == "losses" and there != "targets":
            wrong.append(f"{line}: losses imports {name}; of the package it may use targets only")
        elif here in {"", *GROUND}:
            if there not in GROUND:
                wrong.append(f"{line}: {module} lies below all rooms, but imports {name}")
        elif there not in GROUND and ORDER.index(there) < ORDER.index(here):
            wrong.append(f"{line}: {here} imports upwards: {name}")
    return wrong


def cuda_uses(text: str) -> list[int]:
    """Lines that touch CUDA: torch.cuda, ``.cuda()``, or a call that is given "cuda" or "cuda:0".

    Comparing ``tensor.device.type`` with "cuda", or a table with that key, is asking, not touching, and allowed.
    """
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            lines.append(node.lineno)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                lines.append(node.lineno)
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                lines += [
                    value.lineno for part in ast.walk(value) if _names_cuda(part) and not _inside_call(value, part)
                ]
        elif isinstance(node, ast.FunctionDef | ast.AnnAssign | ast.Assign):
            default = getattr(node, "value", None)
            lines += [node.lineno] if _names_cuda(default) else []
            if isinstance(node, ast.FunctionDef):
                defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value is not None]
                lines += [value.lineno for value in defaults if _names_cuda(value)]
    lines += [line for line, name in imports(ast.parse(text), "") if is_within(name, "torch.cuda")]
    return sorted(lines)


def _names_cuda(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == "cuda" or node.value.startswith("cuda:"))
    )


def _inside_call(outer: ast.AST, part: ast.AST) -> bool:
    """Whether a part of an argument belongs to a comparison, an index, or a call that is looked at by itself."""
    return any(
        isinstance(node, ast.Call | ast.Compare | ast.Subscript) and any(child is part for child in ast.walk(node))
        for node in ast.walk(outer)
    )


def test_every_module_has_a_room() -> None:
    rooms = {room_of(module_of(path)) for path in sources()} - {""}
    assert rooms <= set(ORDER) | GROUND, f"give these a place in the order: {sorted(rooms - set(ORDER) - GROUND)}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_go_downwards(path: Path) -> None:
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert wrong_imports(path.read_text(), module, package) == []


def test_only_the_device_room_touches_cuda() -> None:
    found = {}
    for path in sources():
        if room_of(module_of(path)) != "device":
            lines = cuda_uses(path.read_text())
            if lines:
                found[str(path.relative_to(PACKAGE))] = lines
    more = {name: lines for name, lines in found.items() if len(lines) > CUDA_ALLOWED.get(name, 0)}
    assert not more, f"ask megatron_kd.device instead (file: lines): {more}"
    fewer = {name: count for name, count in CUDA_ALLOWED.items() if len(found.get(name, [])) < count}
    assert not fewer, f"lower these numbers in CUDA_ALLOWED: {fewer}"


@pytest.mark.parametrize(
    ("module", "text", "bad"),
    [
        ("megatron_kd.cache.reader", "from megatron_kd.training import loop", True),
        ("megatron_kd.cache.reader", "def f():\n    from megatron_kd.report import compare", True),
        ("megatron_kd.cache.reader", "from ..report import compare", True),
        ("megatron_kd.cache.reader", "import importlib\nimportlib.import_module('megatron_kd.report')", True),
        ("megatron_kd.cache.reader", "import torch.distributed as dist", True),
        ("megatron_kd.cache.reader", "from torch import distributed", True),
        ("megatron_kd.cache.reader", "from megatron.core import parallel_state", True),
        ("megatron_kd.cache.reader", "import torch\nfrom megatron_kd.errors import CacheError", False),
        ("megatron_kd.cache.reader", "from .schema import Schema\nfrom megatron_kd.targets import TopKTargets", False),
        ("megatron_kd.cache.reader", "from megatron_kd import __version__", False),
        ("megatron_kd.config.load", "def f():\n    import torch", True),
        ("megatron_kd.config.load", "from megatron_kd.testing import run_distributed", True),
        ("megatron_kd.config.load", "from megatron_kd import cache", True),
        ("megatron_kd.losses.fused", "import torch, triton, math\nfrom megatron_kd.targets import TopKTargets", False),
        ("megatron_kd.losses.fused", "import numpy", True),
        ("megatron_kd.losses.fused", "from megatron.core import mpu", True),
        ("megatron_kd.losses.fused", "from megatron_kd.errors import KDError", True),
        ("megatron_kd.losses.fused", "from megatron_kd.device import device", True),
        ("megatron_kd.report.runs", "import torch", True),
        ("megatron_kd.errors", "from megatron_kd.config import Recipe", True),
        ("megatron_kd.files", "from megatron_kd.errors import KDError", False),
        ("megatron_kd.device.cpu", "from megatron_kd.config import Recipe", True),
        ("megatron_kd.__main__", "from megatron_kd.training import loop", False),
    ],
)
def test_the_checker_sees_wrong_imports(module: str, text: str, bad: bool) -> None:
    assert bool(wrong_imports(text, module, module.rpartition(".")[0])) is bad


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.cuda.is_available()", 1),
        ("import torch.cuda", 1),
        ("from torch import cuda", 1),
        ("from torch.cuda import nvtx", 1),
        ("x = y.cuda()", 1),
        ("x.to('cuda')", 1),
        ("x = torch.zeros(2, device='cuda:1')", 1),
        ("x = torch.zeros(2, device='cuda' if a else 'cpu')", 1),
        ("x = torch.zeros(2, device=torch.device('cuda'))", 1),
        ("def f(device='cuda'): ...", 1),
        ("def f(*, device: str = 'cuda'): ...", 1),
        ("device = 'cuda'", 1),
        ("if x.device.type == 'cuda': ...", 0),
        ("f(x.device.type == 'cuda')", 0),
        ("f(BYTES.get(x.device.type, BYTES['cuda']))", 0),
        ("y = x.is_cuda", 0),
        ("raise ValueError('no cuda here')", 0),
    ],
)
def test_the_checker_sees_cuda(text: str, count: int) -> None:
    assert len(cuda_uses(text)) == count


def test_the_package_has_not_lost_its_rooms() -> None:
    assert len(sources()) > 10 and {"config", "losses", "cache"} <= {room_of(module_of(path)) for path in sources()}
