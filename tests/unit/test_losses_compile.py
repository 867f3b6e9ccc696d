"""The registered operator: one node of a compiled graph, equal to eager code, and what torch asks of an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from megatron_kd.losses import linear_full_divergence, linear_topk_divergence
from megatron_kd.losses.op import Scalars, _forward
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import Case, make_case


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Other tests, and commands, turn the compiler off for their process."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield
    if "test_torch_finds" not in request.node.name:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def step(case: Case, kind: str, **kw: Any) -> Step:
    """(hidden, weight) → (loss, l [N], student mass [N]), with something before and after the loss."""
    kw = {"vocab_size": case.vocab_size, "chunk_bytes": 3 * 24 * 8} | kw

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if kind == "topk":
            out = linear_topk_divergence(hidden * 2, weight, case.targets, case.token_weights, **kw)
        else:
            teacher = (case.teacher_hidden, case.teacher_weight)
            out = linear_full_divergence(hidden * 2, weight, *teacher, case.token_weights, **kw)
        return out.loss * 3, out.loss_per_token, out.statistics.student_mass

    return run


def results(run: Step, case: Case, wants: tuple[bool, bool] = (True, True)) -> list[Tensor | None]:
    hidden = case.hidden.clone().requires_grad_(wants[0])
    weight = case.weight.clone().requires_grad_(wants[1])
    loss, *others = run(hidden, weight)
    if loss.requires_grad:
        loss.backward()
    assert not any(other.requires_grad for other in others)
    return [loss.detach(), *others, hidden.grad, weight.grad]


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute", "no_grad", "auto"])
@pytest.mark.parametrize("kind", ["topk", "full"])
def test_a_compiled_step_has_no_graph_break_and_equals_eager(kind: str, mode: str, divergence: str) -> None:
    case = make_case(tokens=8, masked=(2,))
    torch._dynamo.reset()
    eager = step(case, kind, mode=mode, divergence=divergence, labels=case.labels, ce_weight=0.2)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, case), results(eager, case))


@pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
def test_only_what_is_required_comes_back(wants: tuple[bool, bool]) -> None:
    case = make_case()
    torch._dynamo.reset()
    eager = step(case, "topk")
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, case, wants), results(eager, case, wants))


def test_another_mask_does_not_compile_again() -> None:
    """Which rows are left out is decided within the operator."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(hidden: Tensor, weight: Tensor, ids: Tensor, logprobs: Tensor, tail: Tensor, weights: Tensor) -> Tensor:
        targets = TopKTargets(ids, logprobs, tail, 1.0)
        return linear_topk_divergence(hidden, weight, targets, weights, vocab_size=24, mode="recompute").loss

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for masked in ((), (2,), (0, 1, 5), tuple(range(11))):
        case = make_case(tokens=11, masked=masked)
        t = case.targets
        given = (case.weight.requires_grad_(), t.ids, t.logprobs, t.tail_logmass, case.token_weights)
        eager = run(case.hidden.clone().requires_grad_(), *given)
        torch.testing.assert_close(compiled(case.hidden.clone().requires_grad_(), *given), eager)
    assert counter.frame_count == 1


def test_any_number_of_tokens_is_compiled_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(hidden: Tensor, weight: Tensor, ids: Tensor, logprobs: Tensor, tail: Tensor, weights: Tensor) -> Tensor:
        targets = TopKTargets(ids, logprobs, tail, 1.0)
        return linear_topk_divergence(hidden, weight, targets, weights, vocab_size=24).loss

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in (11, 5, 13, 2, 8):
        case = make_case(tokens=tokens)
        t = case.targets
        hidden, again = (case.hidden.clone().requires_grad_() for _ in range(2))
        given = (case.weight.requires_grad_(), t.ids, t.logprobs, t.tail_logmass, case.token_weights)
        run(hidden, *given).backward()
        compiled(again, *given).backward()
        torch.testing.assert_close(again.grad, hidden.grad)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0]


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_a_16_bit_gradient_is_scaled_by_the_whole_upstream(mode: str) -> None:
    """1/7 rounded to bfloat16 is off by 0.2 %, a loss scale of 2^17 is infinite in float16."""
    for dtype, upstream in ((torch.bfloat16, 1 / 7), (torch.float16, 2.0**17)):
        case = make_case()
        case = replace(
            case, hidden=case.hidden.to(dtype), weight=case.weight.to(dtype), token_weights=case.token_weights * 1e-3
        )
        torch._dynamo.reset()
        run = step(case, "topk", mode=mode)

        def scaled(hidden: Tensor, weight: Tensor, run: Step = run, by: float = upstream) -> tuple[Tensor, ...]:
            loss, *others = run(hidden, weight)
            return loss * by, *others

        compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
        got, expected = results(compiled, case), results(scaled, case)
        for a, b in zip(got, expected, strict=True):
            assert a is not None and b is not None and b.isfinite().all()
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_wrong_id_is_refused_in_a_compiled_step_too() -> None:
    case = make_case()
    case.targets.ids[3, 1] = 24
    torch._dynamo.reset()
    compiled = torch.compile(step(case, "topk"), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"targets.ids: id 24 at token 3"):
        results(compiled, case)


def test_main_grad_works_in_a_compiled_step() -> None:
    """Megatron-Core's buffer is no tensor of the graph: the step is cut there, and stays right."""
    case = make_case()
    torch._dynamo.reset()
    found = []
    for wrap in (lambda fn: fn, lambda fn: torch.compile(fn, backend="aot_eager")):
        weight: Any = torch.nn.Parameter(case.weight.clone())
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False
        run = wrap(step(case, "topk", main_grad_accumulation=True))
        hidden = case.hidden.clone().requires_grad_()
        run(hidden, weight)[0].backward()
        assert weight.grad_added_to_main_grad
        found.append((hidden.grad, weight.main_grad))
    torch.testing.assert_close(found[1], found[0])
    assert found[0][1].abs().max() > 0


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
@pytest.mark.parametrize("kind", ["topk", "full"])
def test_torch_finds_the_operator_well_made(kind: str, mode: str) -> None:
    """Schema, aliasing, shapes without data, autograd registration and tracing, by torch's own checks."""
    case = make_case(tokens=5, masked=(1,))
    t = case.targets
    teacher = [t.ids, t.logprobs, t.tail_logmass] if kind == "topk" else [case.teacher_hidden, case.teacher_weight]
    scalars = Scalars(
        divergence="reverse_kl",
        beta=0.5,
        tail="bucket" if kind == "topk" else None,
        temperature=1.7,
        t2=1.7**2,
        ce_weight=0.25,
        vocab_size=24,
        vocab_start=0,
        logit_softcap=3.0,
        teacher_logit_softcap=None,
        group_name=None,
        sequence_parallel=False,
        mode=mode,
        chunk_bytes=3 * 24 * 8,
        wants_hidden=True,
        wants_weight=True,
    )
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    torch.library.opcheck(_forward, (hidden, weight, case.token_weights, case.labels, teacher, *scalars))
    assert [a.name for a in torch.ops.megatron_kd.linear_divergence.default._schema.arguments[5:]] == list(
        Scalars._fields
    )
