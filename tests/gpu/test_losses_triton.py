"""The row passes as Triton kernels on a GPU: against the eager form in float64, blocks of any stride, NaN seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import DIVERGENCES
from megatron_kd.losses.divergences import make_divergence
from megatron_kd.losses.eager_passes import EagerPasses
from megatron_kd.losses.passes import Passes, Scaling, passes_for
from megatron_kd.losses.triton_passes import TritonPasses

K = 11


def test_a_gpu_runs_the_triton_form() -> None:
    assert passes_for(torch.device("cuda")).name == "triton"


# More rows than multiprocessors, several steps a row, the last one not full, rows that are not aligned.
ROWS, COLUMNS = 129, 32771
SCALINGS = [Scaling(1.0, None), Scaling(1.7, None), Scaling(1.7, 30.0)]


def blocks(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(student's logits, teacher's, columns [n, K], owned), exact in float32; row 1 is alike in both."""
    generator = torch.Generator(device="cuda").manual_seed(23)

    def normal() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator, device="cuda").mul_(4).to(dtype)

    student, teacher = normal(), normal()
    teacher[1] = student[1]
    columns = torch.stack([torch.randperm(COLUMNS, generator=generator, device="cuda")[:K] for _ in range(ROWS)])
    owned = torch.rand(ROWS, K, generator=generator, device="cuda") < 0.8
    return student, teacher, torch.where(owned, columns, 0), owned


def topk_pass(form: Passes, dtype: torch.dtype, scaling: Scaling) -> list[Tensor]:
    """Every result of the passes over a block of the student's logits."""
    student, _, columns, owned = blocks(dtype)
    work = form.topk(student, scaling)
    z = work.take(columns, owned)
    work.hide(columns, owned)
    sums = work.sums(True)
    assert sums.ce_total is not None
    total = [sums.highest + sums.total.log(), scaling.temperature * sums.highest + sums.ce_total.log()]
    ones = torch.ones_like(total[0])
    work.write(ones, total[0], -0.5 * ones, total[1])
    work.add(columns, torch.where(owned, z, 0.0), z)
    return [z, *total, student]


def full_pass(form: Passes, dtype: torch.dtype, scaling: Scaling, name: str) -> list[Tensor]:
    """Every result of the passes over both blocks."""
    student, teacher, _, _ = blocks(dtype)
    divergence = make_divergence(name, 0.3)
    work = form.full(student, scaling, teacher, Scaling(scaling.temperature, None))
    sums = work.sums(divergence, True)
    assert sums.student.ce_total is not None
    lse_z = sums.student.highest + sums.student.total.log()
    lse_u = sums.teacher.highest + sums.teacher.total.log()
    ce_lse = scaling.temperature * sums.student.highest + sums.student.ce_total.log()
    cross = [] if sums.cross is None else [sums.offset, sums.cross]
    valued = work
    if sums.cross is not None:  # its value comes from the sums; ask a block that has none
        student_again, teacher_again, _, _ = blocks(dtype)
        valued = form.full(student_again, scaling, teacher_again, Scaling(scaling.temperature, None))
    d, u = valued.values(divergence, lse_z, lse_u)
    ones = torch.ones_like(d)
    work.write(divergence, lse_z, lse_u, u, ones, -0.5 * ones, ce_lse)
    return [lse_z, lse_u, ce_lse, sums.z_at_best, *cross, d, u, student]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Row by row, relative to the row's largest number; infinities must agree."""
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        wrong = torch.where(ours == theirs, 0.0, (ours.double() - theirs.double()).abs())
        size = torch.where(theirs.isfinite(), theirs.double().abs(), 0.0)
        size = size.amax(dim=-1, keepdim=True) if size.dim() == 2 else size + 1
        assert (wrong <= tolerance * size).all(), (number, (wrong / size).max())


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_triton_passes_equal_eager_ones_for_cached_targets(scaling: Scaling) -> None:
    exact = topk_pass(EagerPasses(), torch.float64, scaling)
    assert_close(topk_pass(TritonPasses(), torch.float32, scaling), exact, 3e-5)
    assert_close(topk_pass(TritonPasses(), torch.float64, scaling), exact, 1e-12)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_triton_passes_equal_eager_ones_for_a_full_teacher(name: str, scaling: Scaling) -> None:
    exact = full_pass(EagerPasses(), torch.float64, scaling, name)
    assert_close(full_pass(TritonPasses(), torch.float64, scaling, name), exact, 1e-12)
    if name != "tvd":  # in float32 the sign of q − p may differ where they are nearly equal
        assert_close(full_pass(TritonPasses(), torch.float32, scaling, name), exact, 3e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_nan_shows_on_a_gpu(name: str) -> None:
    """Maxima on a GPU pass over NaN: it must come through all the same, and in its row alone."""
    one, lse = Scaling(1.0, None), torch.zeros(2, device="cuda")
    for broken in range(2):
        logits = [torch.zeros(2, 5000, device="cuda") for _ in range(2)]
        logits[broken][1, 4500] = torch.nan
        work = TritonPasses().full(logits[0], one, logits[1], one)
        sums = work.sums(make_divergence(name, 0.3), False)
        assert (sums.student, sums.teacher)[broken].total.isnan().tolist() == [False, True]
        assert work.values(make_divergence(name, 0.3), lse, lse)[0].isnan().tolist() == [False, True]


def test_rows_more_than_2_to_the_31_numbers_apart() -> None:
    stride, columns = 2**31 + 64, 5000
    try:
        storage = torch.empty(stride + columns, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("needs 8 GiB of GPU memory")
    block = storage.as_strided((2, columns), (stride, 1))
    values = torch.randn(2, columns, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))
    block.copy_(values)
    work = TritonPasses().topk(block, Scaling(1.0, None))
    sums = work.sums(False)
    lse = sums.highest + sums.total.log()
    assert (lse - torch.logsumexp(values, dim=1)).abs().max() <= 1e-5
    work.write(torch.ones_like(lse), lse, None, None)
    assert (block - torch.softmax(values, dim=1)).abs().max() <= 1e-6
