# A kernel's annotations are Triton's: only tl.constexpr may stand there.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton passes in Triton's interpreter; test_losses_triton.py runs this file in a process of its own.

Triton decides when a function is decorated whether it is interpreted, for its own library at its import, and an
interpreted call leaves patches behind: so none of this may happen in the process of the other tests.

Every pass is held against the eager form and against a float64 formula that shares nothing with either.
"""

import math
import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kd.losses import triton_kernels, triton_passes
from megatron_kd.losses.divergences import DIVERGENCES, make_divergence
from megatron_kd.losses.eager_passes import EagerPasses
from megatron_kd.losses.passes import Passes, Scaling
from megatron_kd.losses.triton_passes import TritonPasses
from tests.unit.triton_blocks import Block, Buffer, assert_within, every_block, tolerance, z_of

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run this file with TRITON_INTERPRET=1: Triton must not have been imported without it")

# A select evaluates both sides: numpy warns of the NaN in the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMS: list[Passes] = [TritonPasses(), EagerPasses()]
BETA = 0.3


@triton.jit
def function_kernel(x_pointer, y_pointer, NAME: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_pointer + lanes)
    if NAME == "expm1":
        y = triton_kernels.expm1(x)
    elif NAME == "log1p":
        y = triton_kernels.log1p(x, x + 1.0)
    else:
        y = triton_kernels.tanh(x)
    tl.store(y_pointer + lanes, y)


@pytest.mark.parametrize("name", ["expm1", "log1p", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_lose_no_digits_near_zero(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([-torch.logspace(-37, 2, 3072, dtype=dtype), -torch.linspace(0, 1, 1020, dtype=dtype)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, -1e-45, -torch.inf], dtype=dtype)])
    x[::2] = -x[::2]
    if name == "log1p":
        x = x[(x > -1) & (x < torch.inf)]
        x = torch.cat([x, x.new_zeros(4096 - x.numel())])
    elif name == "expm1":
        x.clamp_(max=80)
    y = torch.empty_like(x)
    function_kernel[(1,)](x, y, NAME=name, BLOCK=4096)
    expected = getattr(torch, name)(x.double())
    error = (y.double() - expected).abs()
    # Relative everywhere but where the result is a denormal number.
    assert (error <= 4 * torch.finfo(dtype).eps * expected.abs() + 4 * torch.finfo(dtype).tiny).all(), (
        x[error.argmax()],
        error.max(),
    )


@pytest.fixture(autouse=True)
def _restore_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``set_block_size`` is undone after the test."""
    for name in ("BLOCK", "PAIR_BLOCK", "SLOTS_BLOCK"):
        monkeypatch.setattr(triton_passes, name, getattr(triton_passes, name))


def set_block_size(size: int) -> None:
    """Small blocks make many steps a row: running maxima that grow, masked last steps."""
    triton_passes.BLOCK = triton_passes.PAIR_BLOCK = size
    triton_passes.SLOTS_BLOCK = min(size, 16)


@every_block
def test_topk_passes(block: Block) -> None:
    set_block_size(block.block)
    rng = block.generator()
    x = block.logits(rng)
    columns, owned = block.slots(rng)
    if block.V == 0:
        owned &= False
    z, slope = z_of(x, block.scaling)
    T = block.scaling.temperature
    eps = tolerance(block.dtype, z * T)
    covered = torch.zeros(block.n, block.V + 1, dtype=torch.bool)
    covered.scatter_(1, torch.where(owned, columns, block.V), True)
    outside = torch.where(covered[:, :-1], -torch.inf, z)
    # What a caller passes: logsumexp over the outside, −inf where there is none, and a finite one for CE.
    lset = torch.logsumexp(outside, dim=1).to(block.dtype).double()
    ce_lse = torch.logsumexp(torch.cat([z * T, z.new_zeros(block.n, 1)], dim=1), dim=1).to(block.dtype).double()
    scale, ce_scale = block.rows(rng), block.rows(rng) if block.with_ce else None
    values = torch.where(owned, torch.randn(columns.shape, generator=rng, dtype=torch.float64), 0.0)
    values = values.to(block.dtype).double()
    for form in FORMS:
        buffer = Buffer(x, block.dtype)
        work = form.topk(buffer.view, block.scaling)
        taken = work.take(columns, owned)
        work.hide(columns, owned)
        sums = work.sums(block.with_ce)
        ce_given = (None, None) if ce_scale is None else block.given(ce_scale, ce_lse)
        work.write(*block.given(scale, lset), *ce_given)
        work.add(columns, values.to(block.dtype), taken)
        assert {taken.dtype, sums.highest.dtype, sums.total.dtype} == {block.dtype}

        at = z.gather(1, columns) if block.V else torch.zeros(columns.shape, dtype=torch.float64)
        assert_within(taken.double(), torch.where(owned, at, -torch.inf), eps)
        highest = sums.highest.double()
        exact_highest = outside.amax(dim=1) if block.V else torch.full_like(highest, -torch.inf)
        assert_within(highest, exact_highest, eps)
        relative = (outside - highest.nan_to_num(neginf=0.0)[:, None]).exp()
        assert_within(sums.total.double(), relative.sum(dim=1), eps * relative.sum(dim=1))
        if block.with_ce:
            assert sums.ce_total is not None
            assert_within(sums.ce_total.double(), relative.pow(T).sum(dim=1), eps * relative.pow(T).sum(dim=1))
        else:
            assert sums.ce_total is None
        expected = scale[:, None] * (outside - lset.nan_to_num(neginf=0.0)[:, None]).exp()
        size = expected.abs()
        if ce_scale is not None:
            ce_part = ce_scale[:, None] * (T * outside - ce_lse[:, None]).exp()
            expected, size = expected + ce_part, size + ce_part.abs()
        added = torch.zeros(block.n, block.V + 1, dtype=torch.float64).scatter_add_(
            1, torch.where(owned, columns, block.V), values
        )[:, :-1]
        # The slope is a difference from 1.
        allowed = eps * (size + added.abs())
        assert_within(buffer.take(), (expected + added) * slope, allowed)


def textbook(name: str, p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(d, u) in float64, from the definitions; the logarithms are given so that they are exact where p underflows."""

    def kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        return torch.where(a == 0, 0.0, a * (log_a - log_b))

    if name == "forward_kl":
        return kl(p, log_p, log_q), -p
    if name == "reverse_kl":
        d = kl(q, log_q, log_p)
        return d, d
    if name == "jsd":
        log_m = torch.logaddexp(log_p + math.log(BETA), log_q + math.log(1 - BETA))
        u = (1 - BETA) * kl(q, log_q, log_m)
        return BETA * kl(p, log_p, log_m) + u, u
    return (q - p).abs() / 2, q * (q - p).sign() / 2


def check_full(name: str, block: Block, *, same: bool = False) -> None:
    set_block_size(block.block)
    rng = block.generator()
    x = block.logits(rng)
    t = x if same else block.logits(rng)
    teacher_scaling = block.scaling if same else Scaling(block.scaling.temperature, None)
    T, divergence = block.scaling.temperature, make_divergence(name, BETA)
    (z, slope), (u, _) = z_of(x, block.scaling), z_of(t, teacher_scaling)
    eps = tolerance(block.dtype, z * T, u * T)
    if block.V:
        lse_z, lse_u = (torch.logsumexp(v, dim=1).to(block.dtype).double() for v in (z, u))
    else:
        lse_z = lse_u = torch.zeros(block.n, dtype=torch.float64)
    log_p, log_q = u - lse_u[:, None], z - lse_z[:, None]
    p, q = log_p.exp(), log_q.exp()
    d, v = textbook(name, p, q, log_p, log_q)
    # Rounding flips the sign of q − p where they are nearly equal.
    doubtful = torch.where((q - p).abs() <= eps * (p + q), q, 0.0) if name == "tvd" else torch.zeros_like(q)
    expectation = v.sum(dim=1).to(block.dtype).double()
    scale, ce_scale = block.rows(rng), block.rows(rng) if block.with_ce else None
    for form in FORMS:
        buffer, teacher = Buffer(x, block.dtype), Buffer(t, block.dtype)
        work = form.full(buffer.view, block.scaling, teacher.view, teacher_scaling)
        sums = work.sums(divergence, block.with_ce)
        for found, values in ((sums.student, z), (sums.teacher, u)):
            highest = found.highest.double()
            assert_within(highest, values.amax(dim=1) if block.V else torch.full_like(highest, -torch.inf), eps)
            relative = (values - highest[:, None]).exp()
            assert_within(found.total.double(), relative.sum(dim=1), eps * relative.sum(dim=1))
            if found is sums.student and block.with_ce:
                assert found.ce_total is not None
                assert_within(found.ce_total.double(), relative.pow(T).sum(dim=1), eps * relative.pow(T).sum(dim=1))
            else:
                assert found.ce_total is None
        check_pair(name, sums, z, u, eps)
        valued = work
        if sums.cross is not None:  # its value comes from the sums; ask a block that has none
            pair = Buffer(x, block.dtype).view, Buffer(t, block.dtype).view
            valued = form.full(pair[0], block.scaling, pair[1], teacher_scaling)
        got_d, got_u = (value.double() for value in valued.values(divergence, *block.given(lse_z, lse_u)))
        sizes = 1 + d.abs().sum(dim=1)
        assert_within(got_d, d.sum(dim=1), eps * sizes)
        assert_within(got_u, v.sum(dim=1), eps * sizes + doubtful.sum(dim=1))
        ce_given = (None, None) if ce_scale is None else block.given(ce_scale, lse_z * T)
        work.write(divergence, *block.given(lse_z, lse_u, expectation, scale), *ce_given)
        expected = scale[:, None] * (v - q * expectation[:, None])
        size = scale[:, None].abs() * (v.abs() + q * expectation.abs()[:, None] + p + q)
        if ce_scale is not None:
            ce_part = ce_scale[:, None] * (T * log_q).exp()
            expected, size = expected + ce_part, size + ce_part.abs()
        written = buffer.take()
        assert_within(written, expected * slope, eps * size + scale[:, None].abs() * doubtful)
        teacher.take()
        if same and block.scaling.softcap is None and block.kind == "plain":
            assert got_d.abs().max() <= 1e-7
            assert ce_scale is None
            # Of the divergence alone: u − q·E, as small as d.
            assert (written - scale[:, None] * (v - q * expectation[:, None])).abs().max() <= 2e-7


def check_pair(name: str, sums: Any, z: Tensor, u: Tensor, eps: float) -> None:
    if not z.shape[1]:
        assert (sums.z_at_best == -torch.inf).all() and (sums.cross is None or (sums.cross == 0).all())
        return
    best = sums.z_at_best.double()
    # Exactly one of the student's numbers, at one of the teacher's largest.
    assert_within(best, z.gather(1, u.argmax(dim=1, keepdim=True))[:, 0], eps)
    offset = sums.offset.double()
    assert offset.isfinite().all()
    if name not in ("forward_kl", "reverse_kl"):
        assert sums.cross is None
        return
    by, sign = ((u, sums.teacher), 1) if name == "forward_kl" else ((z, sums.student), -1)
    weight = (by[0] - by[1].highest.double()[:, None]).exp()
    terms = weight * sign * (u - z - offset[:, None])
    sizes = weight * (1 + (u - z - offset[:, None]).abs())
    assert_within(sums.cross.double(), terms.sum(dim=1), eps * sizes.sum(dim=1))


@pytest.mark.parametrize("name", DIVERGENCES)
@every_block
def test_full_passes(name: str, block: Block) -> None:
    check_full(name, block)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_like_its_teacher_has_no_divergence(name: str, temperature: float) -> None:
    block = Block(3, 150, 64, torch.float32, Scaling(temperature, None), "none", False, "plain", 3)
    check_full(name, block, same=True)


def test_the_first_of_equal_largest_teacher_logits_counts() -> None:
    set_block_size(16)
    z, u = torch.arange(40.0).flip(0).repeat(3, 1), torch.zeros(3, 40)
    u[0, [5, 9, 30]] = 1.0  # within a step and in a later one
    u[1, [20, 36]] = 1.0
    u[2] = -torch.inf
    sums = TritonPasses().full(z, Scaling(1.0, None), u, Scaling(1.0, None)).sums(make_divergence("tvd", BETA), False)
    assert sums.z_at_best.tolist() == [34.0, 19.0, 39.0]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_equal_is_equal_to_the_last_bit(softcap: float | None) -> None:
    """Agreement of the best ids compares z as it was taken with the maximum of the sums."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 4
    scaling = Scaling(1.7, softcap)
    best = x.argmax(dim=1, keepdim=True)
    work = TritonPasses().topk(x.clone(), scaling)
    assert torch.equal(work.take(best, torch.ones_like(best, dtype=torch.bool))[:, 0], work.sums(False).highest)
    pair = TritonPasses().full(x.clone(), scaling, x.clone(), scaling).sums(make_divergence("jsd", BETA), False)
    assert torch.equal(pair.z_at_best, pair.student.highest)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_nan_shows(name: str) -> None:
    """In its row alone, in sums and values, whichever model it comes from."""
    set_block_size(16)
    divergence, one = make_divergence(name, BETA), Scaling(1.0, None)
    for student_is_broken in (True, False):
        z, u = torch.zeros(2, 40), torch.zeros(2, 40)
        (z if student_is_broken else u)[1, 20] = torch.nan
        work = TritonPasses().full(z, one, u, one)
        sums = work.sums(divergence, False)
        broken = sums.student if student_is_broken else sums.teacher
        assert broken.total.isnan().tolist() == [False, True]
        lse = torch.full((2,), math.log(40))
        assert work.values(divergence, lse, lse)[0].isnan().tolist() == [False, True]
    x = torch.zeros(2, 40)
    x[1, 20] = torch.nan
    assert TritonPasses().topk(x, one).sums(True).total.isnan().tolist() == [False, True]


def test_a_teacher_of_no_mass_somewhere_is_finite() -> None:
    """u = −inf: p = 0 there, the reference r stays finite, and the cross sum has no 0·∞."""
    z, u = torch.zeros(1, 40), torch.zeros(1, 40)
    u[0, [0, 30]] = -torch.inf
    one, divergence = Scaling(1.0, None), make_divergence("forward_kl", BETA)
    work = TritonPasses().full(z, one, u, one)
    sums = work.sums(divergence, False)
    assert sums.offset.tolist() == [0.0] and sums.cross is not None and sums.cross.tolist() == [0.0]
    d, _ = work.values(divergence, torch.tensor([math.log(40)]), torch.tensor([math.log(38)]))
    assert d.item() == pytest.approx(math.log(40 / 38), abs=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_probabilities_of_zero(name: str) -> None:
    """Logits of −inf in one model, the other or both (reverse KL is infinite where only the teacher's is)."""
    set_block_size(16)
    x = torch.tensor([[0.0, -torch.inf, 0.5, -torch.inf, 1.0, 0.0] * 5]).double()
    absent = -200.0 if name == "reverse_kl" else -torch.inf
    t = torch.tensor([[0.5, 0.0, absent, -torch.inf, 0.0, -150.0] * 5]).double()
    lse_z, lse_u = (torch.logsumexp(v, dim=1).float().double() for v in (x, t))
    log_p, log_q = t - lse_u[:, None], x - lse_z[:, None]
    p, q = log_p.exp(), log_q.exp()
    d, u = textbook(name, p, q, log_p, log_q)
    one, divergence, eps = Scaling(1.0, None), make_divergence(name, BETA), tolerance(torch.float32, x, t)
    for form in FORMS:
        buffer, teacher = Buffer(x, torch.float32), Buffer(t, torch.float32)
        work = form.full(buffer.view, one, teacher.view, one)
        got_d, got_u = work.values(divergence, lse_z.float(), lse_u.float())
        assert_within(got_d.double(), d.sum(dim=1), eps * (1 + d.abs().sum(dim=1)))
        assert_within(got_u.double(), u.sum(dim=1), eps * (1 + u.abs().sum(dim=1)))
        work.write(divergence, lse_z.float(), lse_u.float(), u.sum(dim=1).float(), torch.ones(1), None, None)
        assert_within(buffer.take(), u - q * u.sum(dim=1), eps * (u.abs() + q * u.sum().abs() + p + q))


@pytest.mark.parametrize("beta", [1e-8, 1e-3, 1 - 1e-3, 1 - 1e-7])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_jsd_near_its_limits_keeps_the_digits_of_its_gradient(form: Passes, beta: float) -> None:
    rng = torch.Generator().manual_seed(0)
    z, u = (torch.randn(3, 70, generator=rng) * 8 for _ in range(2))
    lse_z, lse_u = torch.logsumexp(z, dim=1), torch.logsumexp(u, dim=1)
    log_q, log_p = z.double() - lse_z.double()[:, None], u.double() - lse_u.double()[:, None]
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    expected = (1 - beta) * log_q.exp() * (log_q - log_m)
    nothing, one = torch.zeros(3), Scaling(1.0, None)
    block = form.full(z, one, u, one)
    block.write(make_divergence("jsd", beta), lse_z, lse_u, nothing, torch.ones(3), None, None)
    assert (z.double() - expected).abs().max() <= 1e-4 * expected.abs().max()
