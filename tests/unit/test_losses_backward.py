"""What flows back: modes, upstream factors, accumulation over microbatches, Megatron-Core's main_grad."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.losses import IMPLEMENTATIONS, linear_topk_divergence
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import DIVERGENCES, METHODS, Case, make_case, oracle_run


def part_of(case: Case, rows: slice) -> Case:
    t = case.targets
    return replace(
        case,
        hidden=case.hidden[rows],
        teacher_hidden=case.teacher_hidden[rows],
        targets=TopKTargets(t.ids[rows], t.logprobs[rows], t.tail_logmass[rows], t.temperature),
        token_weights=case.token_weights[rows],
        labels=case.labels[rows],
    )


def call(case: Case, name: str, hidden: Tensor, weight: Tensor, kind: str = "topk", **kw: Any) -> Any:
    kw = {"vocab_size": case.vocab_size, "chunk_bytes": 3 * case.vocab_size * 8} | kw
    if kind == "topk":
        return IMPLEMENTATIONS[name].topk(hidden, weight, case.targets, case.token_weights, **kw)
    teacher = (case.teacher_hidden, case.teacher_weight)
    return IMPLEMENTATIONS[name].full(hidden, weight, *teacher, case.token_weights, **kw)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_microbatches_of_three_and_one_equal_two_and_two_equal_four(
    name: str, mode: str, kind: str, divergence: str
) -> None:
    """Four valid tokens of eight in every cut; the loss is divided by the tokens of the whole batch."""
    case = make_case(tokens=8, masked=(1, 3, 4, 6))
    gradients = []
    for cuts in ((0, 8), (0, 6, 8), (0, 3, 8), (0, 5, 6, 8)):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        for start, stop in pairwise(cuts):
            piece = part_of(case, slice(start, stop))
            (call(piece, name, hidden[start:stop], weight, kind, mode=mode, divergence=divergence).loss / 4).backward()
        gradients.append((hidden.grad, weight.grad))
    for got in gradients[1:]:
        torch.testing.assert_close(got, gradients[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_backward_twice_gives_the_same_gradient_or_raises(kind: str) -> None:
    case = make_case()
    for name, mode in METHODS:
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        loss = call(case, name, hidden, weight, kind, mode=mode).loss
        first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
        kept = [g.clone() for g in first]
        if mode == "single_pass":
            with pytest.raises(RuntimeError, match=r"can be taken once.*recompute"):
                torch.autograd.grad(loss, (hidden, weight))
        else:
            second = torch.autograd.grad(loss, (hidden, weight))
            torch.testing.assert_close([3 * g for g in second], kept)
        torch.testing.assert_close(list(first), kept)


@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), [m for m in METHODS if m[0] != "dense"])
def test_a_second_derivative_is_refused(name: str, mode: str, kind: str) -> None:
    """Not a constant, as torch's own once_differentiable makes it under an upstream of 1."""
    case = make_case()
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = call(case, name, hidden, weight, kind, mode=mode).loss
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (gradient.square().sum() + hidden.sum()).backward()


@pytest.mark.parametrize("argument", ["ids", "logprobs", "tail_logmass", "token_weights", "labels", "teacher_hidden"])
def test_what_recompute_reads_again_must_not_have_changed(argument: str) -> None:
    case = make_case()
    kind = "full" if argument == "teacher_hidden" else "topk"
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    out = call(case, "fused", hidden, weight, kind, mode="recompute", labels=case.labels, ce_weight=0.5)
    getattr(case if hasattr(case, argument) else case.targets, argument).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_a_teacher_of_an_inference_mode(kind: str) -> None:
    case = make_case()
    _, _, dh, dw = oracle_run(case, kind)
    with torch.inference_mode():
        t = case.targets
        targets = TopKTargets(t.ids.clone(), t.logprobs.clone(), t.tail_logmass.clone(), t.temperature)
        case = replace(
            case,
            targets=targets,
            teacher_hidden=case.teacher_hidden.clone(),
            teacher_weight=case.teacher_weight.clone(),
            token_weights=case.token_weights.clone(),
        )
    for mode in ("single_pass", "recompute"):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        call(case, "fused", hidden, weight, kind, mode=mode).loss.backward()
        torch.testing.assert_close((hidden.grad, weight.grad), (dh, dw))


@pytest.mark.parametrize("kind", ["topk", "full"])
def test_every_mode_and_requires_grad(kind: str) -> None:
    """Exactly the gradients that are required come back, and they are right, in every mode."""
    case = make_case(masked=(2,))
    _, _, dh, dw = oracle_run(case, kind)
    for name in IMPLEMENTATIONS:
        for mode in ("auto", "single_pass", "frozen_head", "recompute", "no_grad"):
            for wants_hidden in (True, False):
                for wants_weight in (True, False):
                    if mode == "frozen_head" and wants_weight:
                        continue
                    hidden = case.hidden.clone().requires_grad_(wants_hidden)
                    weight = case.weight.clone().requires_grad_(wants_weight)
                    loss = call(case, name, hidden, weight, kind, mode=mode).loss
                    if mode == "no_grad" or not (wants_hidden or wants_weight):
                        assert not loss.requires_grad
                        continue
                    loss.backward()
                    for got, expected, wanted in ((hidden.grad, dh, wants_hidden), (weight.grad, dw, wants_weight)):
                        assert (got is not None) == wanted
                        if got is not None:
                            torch.testing.assert_close(got, expected)


def test_without_grad_mode_nothing_requires_a_gradient() -> None:
    case = make_case()
    for name in IMPLEMENTATIONS:
        with torch.no_grad():
            out = call(case, name, case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_())
        assert not out.loss.requires_grad


def megatron_head(weight: Tensor, main_grad_dtype: torch.dtype, **flags: bool) -> Any:
    parameter: Any = torch.nn.Parameter(weight.clone())
    parameter.main_grad = torch.ones(weight.shape, dtype=main_grad_dtype)
    for name, value in flags.items():
        setattr(parameter, name, value)
    return parameter


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_main_grad_accumulates_and_the_placeholder_is_not_the_gradient(mode: str, dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, masked=(2,))
    _, _, _, dw = oracle_run(case, upstream=0.5)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    weight = megatron_head(case.weight, accumulator, grad_added_to_main_grad=False, zero_out_wgrad=True)
    for _ in range(2):
        out = call(case, "fused", case.hidden.clone().requires_grad_(), weight, mode=mode, main_grad_accumulation=True)
        (0.5 * out.loss).backward()
    assert weight.grad_added_to_main_grad is True
    # zero_out_wgrad: a tied embedding adds its own gradient to what is returned.
    assert weight.grad is not None and (weight.grad == 0).all() and weight.grad.dtype == dtype
    torch.testing.assert_close(weight.main_grad.double() - 1, 2 * dw, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_main_grad_of_another_dtype_and_without_the_flag(mode: str) -> None:
    case = make_case(dtype=torch.float32)
    _, _, _, dw = oracle_run(case)
    weight = megatron_head(case.weight, torch.bfloat16)
    out = call(case, "fused", case.hidden.requires_grad_(), weight, mode=mode, main_grad_accumulation=True)
    out.loss.backward()
    assert weight.grad is None
    error = (weight.main_grad.double() - 1 - dw).abs().max()
    assert error < 0.1 * dw.abs().max()


def test_two_placeholders_of_two_steps_do_not_mix() -> None:
    """A consumer that adds into the placeholder must not leave its numbers for the next step."""
    case = make_case(dtype=torch.float32)
    for _ in range(2):
        weight = megatron_head(case.weight, torch.float32, grad_added_to_main_grad=False, zero_out_wgrad=True)
        call(case, "fused", case.hidden, weight, mode="single_pass", main_grad_accumulation=True).loss.backward()
        assert weight.grad is not None and (weight.grad == 0).all()
        weight.grad += 1


def test_auto_takes_recompute_when_microbatches_are_in_flight() -> None:
    """The single pass would hold one weight gradient for each: only recompute can go backward twice, which tells."""
    case = make_case()
    for in_flight, repeatable in ((1, False), (2, True)):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        loss = linear_topk_divergence(
            hidden, weight, case.targets, case.token_weights, vocab_size=24, microbatches_in_flight=in_flight
        ).loss
        loss.backward(retain_graph=True)
        if repeatable:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="can be taken once"):
                loss.backward()
