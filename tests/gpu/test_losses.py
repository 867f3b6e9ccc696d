"""The losses on a GPU: against float64 on the CPU, without waiting for the host, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import DIVERGENCES, IMPLEMENTATIONS
from megatron_kd.losses.divergences import make_divergence
from megatron_kd.losses.eager_passes import EagerPasses
from megatron_kd.losses.passes import Passes, Scaling, passes_for
from megatron_kd.losses.triton_passes import TritonPasses
from megatron_kd.targets import TopKTargets

N, D, V, K = 65, 32, 777, 11
PADDED = 896
MODES = [("dense", "auto"), ("forward_chunked", "auto")] + [
    ("fused", mode) for mode in ("single_pass", "recompute", "frozen_head", "no_grad")
]


def problem(dtype: torch.dtype) -> dict[str, Any]:
    """Inputs rounded to ``dtype``; one row is left out and one has unused slots."""
    generator = torch.Generator().manual_seed(17)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    head = torch.randn(PADDED, D, generator=generator).to(dtype)
    teacher = torch.log_softmax(torch.randn(N, V, generator=generator, dtype=torch.float64) * 3, dim=1)
    logprobs, ids = teacher.topk(K, dim=1)
    tail = torch.logsumexp(teacher.scatter(1, ids, -torch.inf), dim=1)
    weights = torch.ones(N)
    weights[3] = 0
    return {
        "hidden": hidden,
        "head": head,
        "teacher_hidden": torch.randn(N, D, generator=generator).to(dtype),
        "teacher_head": torch.randn(PADDED, D, generator=generator).to(dtype),
        "targets": TopKTargets(ids.int(), logprobs.float(), tail.float(), 1.0),
        "weights": weights,
    }


def run(given: dict[str, Any], kind: str, name: str, mode: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The loss per token and, where the mode makes them, the gradients of hidden states and head; on the CPU."""
    hidden = given["hidden"].detach().to(device, dtype, copy=True).requires_grad_(mode != "no_grad")
    head = given["head"].detach().to(device, dtype, copy=True).requires_grad_(mode not in ("no_grad", "frozen_head"))
    weights = given["weights"].to(device)
    if kind == "topk":
        output = IMPLEMENTATIONS[name].topk(
            hidden, head, given["targets"].to(device), weights, vocab_size=V, mode=mode, chunk_bytes=4 * PADDED * 16
        )
    else:
        output = IMPLEMENTATIONS[name].full(
            hidden,
            head,
            given["teacher_hidden"].to(device, dtype),
            given["teacher_head"].to(device, dtype),
            weights,
            vocab_size=V,
            mode=mode,
            chunk_bytes=4 * PADDED * 16,
        )
    if mode != "no_grad":
        output.loss.backward()
    found = [output.loss_per_token, hidden.grad, head.grad]
    return [value.double().cpu() for value in found if value is not None]


@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_equals_float64(name: str, mode: str, dtype: torch.dtype, kind: str) -> None:
    given = problem(dtype)
    ours = run(given, kind, name, mode, "cuda", dtype)
    oracle = run(
        given, kind, "dense", "auto" if mode in ("auto", "single_pass", "recompute") else mode, "cpu", torch.float64
    )
    assert len(ours) == len(oracle) == {"no_grad": 1, "frozen_head": 2}.get(mode, 3)
    for got, expected in zip(ours, oracle, strict=True):
        # Values are float32 in both; a gradient is returned in the dtype of its input, bfloat16 having 8 bits.
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_the_fused_loss_never_waits_for_the_host(mode: str) -> None:
    given = problem(torch.bfloat16)
    hidden = given["hidden"].cuda().requires_grad_()
    head = given["head"].cuda().requires_grad_()
    targets, weights = given["targets"].to("cuda"), given["weights"].cuda()

    def step() -> None:
        IMPLEMENTATIONS["fused"].topk(hidden, head, targets, weights, vocab_size=V, mode=mode).loss.backward()

    step()  # libraries initialise themselves, with waits, at their first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def peak(name: str, chunk_bytes: int, tokens: int, vocab: int) -> int:
    """Bytes at the peak of a forward and backward pass beyond inputs."""
    hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(K, device="cuda", dtype=torch.int32).expand(tokens, K).contiguous()
    targets = TopKTargets(
        ids, torch.full((tokens, K), -4.0, device="cuda"), torch.full((tokens,), -0.25, device="cuda")
    )
    weights = torch.ones(tokens, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    IMPLEMENTATIONS[name].topk(
        hidden, head, targets, weights, vocab_size=vocab, mode="auto", chunk_bytes=chunk_bytes
    ).loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_only_the_fused_loss_is_independent_of_tokens_times_vocabulary() -> None:
    tokens, vocab, chunk = 8192, 32768, 64 << 20
    everything = 4 * tokens * vocab
    gradients = 4 * 256 * vocab + 2 * 256 * (vocab + tokens) * 2
    peaks = {name: peak(name, chunk, tokens, vocab) for name in ("fused", "forward_chunked", "dense")}
    assert peaks["fused"] < 3 * chunk + 2 * gradients + (64 << 20), peaks
    assert peaks["fused"] < everything / 2 < peaks["dense"], peaks
    assert peaks["fused"] < peaks["forward_chunked"], peaks


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
    d, u = work.values(divergence, lse_z, lse_u)
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
