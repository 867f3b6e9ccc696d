"""The Triton passes without a GPU: their numbers in the interpreter, their machine code from the compiler.

The interpreter shows that the arithmetic is right, the compiler that a GPU takes the kernels, that offsets are of 64
bits and that nothing spills; only their speed needs a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.losses import DIVERGENCES, passes, triton_passes
from megatron_kd.losses.passes import Scaling

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: run triton_interpreted_*.py instead", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megatron_kd.losses import triton_full_kernels as pair  # noqa: E402
from megatron_kd.losses import triton_kernels as single  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own from the root of the repository."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)


FILES = [f"tests/unit/triton_interpreted_{part}.py" for part in ("passes", "losses")]


@pytest.mark.slow
def test_the_numbers_are_right_in_the_interpreter() -> None:
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert counted and int(counted[1]) > 50 and "skipped" not in done.stdout, done.stdout[-2000:]


# The arguments of the cross-entropy.
CE = ("ce_total_pointer", "ce_scale_pointer", "ce_shift_pointer")
SINGLE = [single.topk_sums_kernel, single.topk_write_kernel, single.take_kernel, single.hide_kernel, single.add_kernel]
PAIR = [pair.full_sums_kernel, pair.full_values_kernel, pair.full_write_kernel]
# "bare" is without cross-entropy, soft-cap and temperature.
VARIANTS = [
    pytest.param("fp32", 80, True, id="ampere-bare"),
    pytest.param("fp32", 90, False, id="hopper"),
    pytest.param("fp64", 90, False, id="hopper-float64"),
]
PAIR_VARIANTS = [
    pytest.param("forward_kl", "fp32", 80, True, id="forward_kl-ampere-bare"),
    *[pytest.param(name, "fp32", 90, False, id=f"{name}-hopper") for name in DIVERGENCES],
    pytest.param("jsd", "fp64", 90, False, id="jsd-hopper-float64"),
]
POINTERS = {"columns_pointer": "*i64", "owned_pointer": "*i1"}


def compiled(kernel: Any, dtype: str, capability: int, *, bare: bool, divergence: str = "") -> Any:
    """A kernel as the passes launch it, for a GPU of that compute capability; bare ones over K = 1, as for labels."""
    constants: dict[str, Any] = {"DIVERGENCE": divergence, "BETA": 0.5}
    for model in ("", "TEACHER_"):
        constants |= {f"{model}TEMPERATURE": 1.0 if bare else 2.0, f"{model}SOFTCAP": None if bare else 30.0}
    signature, given, aligned = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = POINTERS.get(name, f"*{dtype}" if name.endswith("pointer") else "i32")
        if parameter.is_constexpr:
            given[name] = block_of(kernel, bare) if name == "BLOCK" else constants[name]
        elif (bare and name in CE) or (name == "cross_pointer" and divergence in ("jsd", "tvd")):
            given[name] = None
        elif name == "K" and bare:
            given[name] = 1  # Triton makes a constant of an argument of 1
        elif name != "K":
            aligned[(number,)] = [["tt.divisibility", 16]]
        if name in given:
            signature[name] = "constexpr"
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    options = {"num_warps": triton_passes.WARPS if block_of(kernel, bare) > 1024 else 4}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def block_of(kernel: Any, bare: bool) -> int:
    """The step at which the passes launch it: those over K for a label and for 100 ids."""
    if kernel in PAIR:
        return triton_passes.PAIR_BLOCK
    if "topk" in kernel.__name__:
        return triton_passes.BLOCK
    return 1 if bare else 128


def name_of(kernel: Any) -> str:
    return str(kernel.__name__)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before counts, and nothing is left in the home directory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def check_machine_code(code: Any, dtype: str, folder: Path) -> None:
    # Every pointer to a row: program id and stride are widened, then multiplied and added in 64 bits.
    assert set(re.findall(r"arith\.muli [^\n]*: (\S+)", code.asm["ttir"])) == {"i64"}
    rows = re.findall(r"tt\.addptr %[xt]_pointer, [^\n]*: !tt\.ptr<\w+>, (i\d+)", code.asm["ttir"])
    assert rows and set(rows) == {"i64"}
    binary = folder / "kernel.cubin"
    binary.write_bytes(code.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack, usage
    if dtype == "fp32":
        assert stack[1] == "0", f"registers spill to memory: {usage}"


@pytest.mark.parametrize(("dtype", "capability", "bare"), VARIANTS)
@pytest.mark.parametrize("kernel", SINGLE, ids=name_of)
def test_kernels_of_cached_targets_compile(
    kernel: Any, dtype: str, capability: int, bare: bool, tmp_path: Path
) -> None:
    check_machine_code(compiled(kernel, dtype, capability, bare=bare), dtype, tmp_path)


@pytest.mark.parametrize(("divergence", "dtype", "capability", "bare"), PAIR_VARIANTS)
@pytest.mark.parametrize("kernel", PAIR, ids=name_of)
def test_kernels_of_a_full_teacher_compile(
    kernel: Any, dtype: str, capability: int, bare: bool, divergence: str, tmp_path: Path
) -> None:
    check_machine_code(compiled(kernel, dtype, capability, bare=bare, divergence=divergence), dtype, tmp_path)


def test_available_says_whether_triton_is_there() -> None:
    assert triton_passes.AVAILABLE
    assert [passes.passes_for(torch.device(name)).name for name in ("cpu", "cuda")] == ["eager", "triton"]
    without = """if True:
        import sys
        sys.modules["triton"] = None
        import torch
        from megatron_kd.losses import passes, triton_passes
        print(triton_passes.AVAILABLE, passes.passes_for(torch.device("cuda")).name)
    """
    done = python("-c", without)
    assert done.stdout == "False eager\n", done.stderr


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "float32 or float64 logits, not torch.bfloat16"),
        (torch.zeros(3, 2).t(), r"adjacent columns.*\(2, 3\).*\(1, 2\)"),
        (torch.zeros(6), r"\[n, V\].*\(6,\)"),
    ],
    ids=["dtype", "columns", "dimensions"],
)
def test_blocks_that_the_kernels_cannot_read_are_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_passes.TritonPasses().topk(logits, Scaling(1.0, None))
    with pytest.raises(ValueError, match=message):
        triton_passes.TritonPasses().full(torch.zeros(2, 3), Scaling(1.0, None), logits, Scaling(1.0, None))


def test_unlike_models_are_refused() -> None:
    one = Scaling(1.0, None)
    for teacher in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="student and teacher logits must be alike"):
            triton_passes.TritonPasses().full(torch.zeros(2, 3), one, teacher, one)


def test_the_triton_form_satisfies_the_protocol() -> None:
    form: passes.Passes = triton_passes.TritonPasses()
    assert (form.name, form.keeps_slope) == ("triton", False)
