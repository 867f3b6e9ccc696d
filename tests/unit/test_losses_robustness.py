"""Targets, tokens and inputs that bite: garbage in masked rows, odd slots, precision, strides, bad arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_kd.losses import IMPLEMENTATIONS, linear_full_divergence, linear_topk_divergence
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import (
    ALL_METHODS,
    COMBINATIONS,
    DIVERGENCES,
    METHODS,
    Case,
    Run,
    assert_agrees,
    make_case,
    oracle_run,
    run_case,
    with_targets,
)


def assert_equal_runs(a: Run, b: Run) -> None:
    for x, y in (
        (a.output.loss, b.output.loss),
        (a.output.loss_per_token, b.output.loss_per_token),
        (a.hidden_gradient, b.hidden_gradient),
        (a.weight_gradient, b.weight_gradient),
    ):
        assert torch.equal(x, y)


def slots(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t = case.targets
    return t.ids.clone(), t.logprobs.clone(), t.tail_logmass.clone()


@pytest.mark.parametrize(("divergence", "tail_name"), COMBINATIONS)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_targets_of_masked_rows_do_not_matter(name: str, mode: str, divergence: str, tail_name: str) -> None:
    case = make_case(tokens=8, masked=(1, 2, 6))
    ids, logprobs, tail = slots(case)
    ids[1], logprobs[1], tail[1] = 10**9, torch.nan, torch.nan
    ids[2], logprobs[2], tail[2] = -7, torch.inf, torch.inf
    logprobs[6], tail[6] = -torch.inf, -torch.inf
    labels = case.labels.clone()
    labels[6] = 10**6
    garbage = replace(with_targets(case, ids, logprobs, tail), labels=labels)
    kw: dict[str, Any] = {"ce_weight": 0.4, "divergence": divergence, "tail": tail_name}
    clean, dirty = (run_case(c, name, mode, **kw) for c in (case, garbage))
    assert_equal_runs(clean, dirty)
    assert (dirty.hidden_gradient[[1, 2, 6]] == 0).all() and (dirty.output.loss_per_token[[1, 2, 6]] == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_everything_masked(name: str, mode: str, divergence: str) -> None:
    case = make_case(masked=tuple(range(7)))
    ids, logprobs, tail = slots(case)
    case = with_targets(case, ids, logprobs * torch.nan, tail * torch.nan)
    for kind in ("topk", "full"):
        run = run_case(case, name, mode, kind, divergence=divergence)
        assert run.output.loss == 0 and run.output.loss.requires_grad
        assert (run.hidden_gradient == 0).all() and (run.weight_gradient == 0).all()


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", torch.nan, "targets.logprobs: nan at token 3 is not the logarithm"),
        ("logprobs", 2.5, "targets.logprobs: 2.5 at token 3 is not the logarithm"),
        ("tail_logmass", torch.nan, "targets.tail_logmass: nan at token 3 is not the logarithm"),
        ("tail_logmass", torch.inf, "targets.tail_logmass: inf at token 3 is not the logarithm"),
    ],
)
def test_a_broken_row_that_counts_is_refused(name: str, field: str, value: float, message: str) -> None:
    case = make_case()
    ids, logprobs, tail = slots(case)
    if field == "logprobs":
        logprobs[3, 2] = value
    else:
        tail[3] = value
    with pytest.raises(ValueError, match=message):
        run_case(with_targets(case, ids, logprobs, tail), name, "auto")


def test_an_unused_slot_may_hold_anything() -> None:
    case = make_case()
    ids, logprobs, tail = slots(case)
    ids[2, 1], logprobs[2, 1] = -1, -torch.inf
    clean = with_targets(case, ids, logprobs, tail)
    dirty = with_targets(case, ids, logprobs.masked_fill(ids < 0, torch.nan), tail)
    for name, mode in METHODS:
        assert_equal_runs(run_case(clean, name, mode), run_case(dirty, name, mode))


@pytest.mark.parametrize(("divergence", "tail_name"), [c for c in COMBINATIONS if c[1] != "truncate"])
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_unused_duplicated_and_impossible_slots(name: str, mode: str, divergence: str, tail_name: str) -> None:
    """Id −1 is not id 0; copies of an id add up; probability 0 belongs to S; token 0 outside S stays outside."""
    case = make_case(top_k=6)
    ids, logprobs, tail = slots(case)
    ids[0] = torch.tensor([5, -1, 9, -1, -1, 2])
    ids[1] = torch.tensor([5, 5, 9, 5, 0, 2])
    logprobs[2, 4] = -torch.inf
    ids[3, 1:], logprobs[3, 1:] = -1, -torch.inf
    tail[4] = -torch.inf
    case = with_targets(case, ids, logprobs, tail)
    kw: dict[str, Any] = {"tail": tail_name, "divergence": divergence}
    assert_agrees(run_case(case, name, mode, **kw), oracle_run(case, **kw))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_no_vocabulary_left_for_the_tail(name: str, mode: str, divergence: str) -> None:
    """Every id is cached and the stored tail is not 0, by rounding: the tail counts as 0."""
    case = make_case(vocab=6, top_k=6)
    ids, logprobs, tail = slots(case)
    case = with_targets(case, ids, logprobs, torch.full_like(tail, -8.0))
    assert_agrees(run_case(case, name, mode, divergence=divergence), oracle_run(case, divergence=divergence))


@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_tail_far_below_the_set_is_exact_in_float32(name: str, mode: str) -> None:
    """The student's tail has e^−120 of the mass, below float32: 1 − Σq and exp(tail − max) both fail here."""
    case = make_case(tokens=3, size=24, vocab=24, padding=0, dtype=torch.float32)
    hidden, ids = torch.full((3, 24), -60.0), case.targets.ids.long()
    hidden.scatter_(1, ids, 60.0)
    hidden += torch.linspace(0, 1, 24)
    case = replace(case, hidden=hidden, weight=torch.eye(24))
    run, expected = run_case(case, name, mode), oracle_run(case)
    torch.testing.assert_close(run.output.loss_per_token.double(), expected[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(run.hidden_gradient.double(), expected[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_float16_targets(name: str, mode: str) -> None:
    case = make_case()
    ids, logprobs, tail = slots(case)
    case = with_targets(case, ids, logprobs.half(), tail.float())
    assert_agrees(run_case(case, name, mode), oracle_run(case))


@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("f32", "bf16"), ("bf16", "f32"), ("f16", "f16"), ("f32", "f32")])
@pytest.mark.parametrize(
    ("kind", "divergence", "tail_name"), [("topk", *c) for c in COMBINATIONS] + [("full", d, "") for d in DIVERGENCES]
)
def test_low_precision_inputs_get_float32_arithmetic(
    kind: str, divergence: str, tail_name: str, dtypes: tuple[str, str]
) -> None:
    """The oracle sees the same rounded inputs; only the results are rounded to the inputs' dtype."""
    kw: dict[str, Any] = {"divergence": divergence} | ({"tail": tail_name} if kind == "topk" else {})
    known = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
    hidden_dtype, weight_dtype = (known[d] for d in dtypes)
    case = make_case(tokens=40, size=16, vocab=64, dtype=torch.float32)
    case = replace(
        case,
        hidden=case.hidden.to(hidden_dtype),
        weight=case.weight.to(weight_dtype),
        teacher_hidden=case.teacher_hidden.to(hidden_dtype),
        teacher_weight=case.teacher_weight.to(weight_dtype),
    )
    loss, per_token, dh, dw = oracle_run(case, kind, **kw)
    for name, mode in ALL_METHODS:
        run = run_case(case, name, mode, kind, rows=8, autocast=True, **kw)
        assert run.output.loss.dtype == run.output.loss_per_token.dtype == torch.float32
        torch.testing.assert_close(run.output.loss.double(), loss, rtol=2e-6, atol=0)
        torch.testing.assert_close(run.output.loss_per_token.double(), per_token, rtol=5e-6, atol=5e-6)
        for got, expected, dtype in ((run.hidden_gradient, dh, hidden_dtype), (run.weight_gradient, dw, weight_dtype)):
            assert got.dtype == dtype
            rounding = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
            assert (got.double() - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("masked", [(), (1, 4)])
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_three_dimensional_and_strided_hidden_states(name: str, mode: str, kind: str, masked: tuple[int, ...]) -> None:
    """[b, s, D] seen as [s, b, D], against the flat call; targets and weights as [s, b, …]."""
    s, b = 4, 3
    flat = make_case(tokens=s * b, masked=masked)

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.view(s, b, -1).transpose(0, 1).contiguous().transpose(0, 1)

    t = flat.targets
    shaped = TopKTargets(t.ids.view(s, b, -1), t.logprobs.view(s, b, -1), t.tail_logmass.view(s, b), 1.0)
    hidden = strided(flat.hidden).requires_grad_()
    wide = torch.randn(5, 54, dtype=torch.float64)[:, ::2].t()  # a strided view for the head
    weight = wide.copy_(flat.weight).requires_grad_()
    assert not hidden.is_contiguous() and not weight.is_contiguous()
    kw: dict[str, Any] = {"vocab_size": 24, "mode": mode, "chunk_bytes": 5 * 24 * 8, "labels": flat.labels.view(s, b)}
    kw |= {"ce_weight": 0.5}
    weights = flat.token_weights.view(s, b)
    if kind == "topk":
        out = IMPLEMENTATIONS[name].topk(hidden, weight, shaped, weights, **kw)
    else:
        teacher = strided(flat.teacher_hidden)
        out = IMPLEMENTATIONS[name].full(hidden, weight, teacher, flat.teacher_weight, weights, **kw)
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None and hidden.grad.shape == (s, b, 5)
    assert_agrees(Run(out, hidden.grad.reshape(-1, 5), weight.grad), oracle_run(flat, kind, ce_weight=0.5))


@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_the_callers_tensors_are_left_alone(name: str, mode: str) -> None:
    case = make_case(dtype=torch.float32)
    t = case.targets
    owned = [case.hidden, case.weight, case.teacher_hidden, case.teacher_weight, case.token_weights, case.labels]
    owned += [t.ids, t.logprobs, t.tail_logmass]
    before = [x.clone() for x in owned]
    for kind in ("topk", "full"):
        hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
        kw: dict[str, Any] = {"vocab_size": 24, "mode": mode, "labels": case.labels, "ce_weight": 0.1}
        if kind == "topk":
            out = IMPLEMENTATIONS[name].topk(hidden, weight, t, case.token_weights, **kw)
        else:
            teacher = (case.teacher_hidden, case.teacher_weight)
            out = IMPLEMENTATIONS[name].full(hidden, weight, *teacher, case.token_weights, **kw)
        out.loss.backward()
    for x, y in zip(owned, before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"divergence": "hellinger"}, "divergence 'hellinger' is not available; available: forward_kl, reverse_kl"),
        ({"divergence": "jsd", "tail": "truncate"}, "only for forward_kl: the truncated rows are no distributions"),
        ({"divergence": "reverse_kl", "tail": "renormalize_teacher"}, "forward_kl, jsd, tvd: the teacher has no mass"),
        ({"beta": 1.0, "divergence": "jsd"}, "strictly between 0 and 1, not 1.0"),
        ({"beta": float("nan")}, "strictly between 0 and 1, not nan"),
        ({"tail": "ghost"}, "tail 'ghost' is not available; available: bucket"),
        ({"beta": 0.0}, "beta must lie strictly between 0 and 1"),
        ({"mode": "fast"}, "mode 'fast' is not available"),
        ({"mode": "frozen_head"}, "requires a gradient"),
        ({"ce_weight": 0.5}, "no labels"),
        ({"ce_weight": 1.5}, "ce_weight must lie in"),
        ({"logit_softcap": 0.0}, "logit_softcap must be positive"),
        ({"logit_softcap": float("inf")}, "logit_softcap must be positive and finite"),
        ({"vocab_size": 28}, "must hold the whole vocabulary"),
        ({"vocab_start": 2}, "must hold the whole vocabulary"),
        ({"chunk_bytes": -1}, "chunk_bytes must be positive"),
        ({"gradient_bytes": -1}, "gradient_bytes must not be negative"),
        ({"microbatches_in_flight": 0}, "microbatches_in_flight must be at least 1"),
        ({"main_grad_accumulation": True}, "main_grad"),
        ({"token_weights": torch.ones(6)}, r"token_weights has shape \(6,\).*need \(7,\)"),
        ({"token_weights": torch.ones(1, 7)}, "sequence first"),
        ({"labels": torch.zeros(3, dtype=torch.int64), "ce_weight": 0.1}, r"labels has shape \(3,\)"),
        ({"labels": torch.zeros(7), "ce_weight": 0.1}, r"labels must be token ids.*not torch.float32"),
        ({"labels": torch.zeros(7, dtype=torch.bool), "ce_weight": 0.1}, r"labels must be token ids.*not torch.bool"),
        ({"token_weights": torch.ones(7, dtype=torch.complex64)}, "token_weights must be real numbers"),
        ({"hidden": torch.ones(7, 5, dtype=torch.int64)}, "hidden must be floating point, not torch.int64"),
        ({"hidden": torch.ones(7, 4)}, r"hidden must be \[N, 5\]"),
        ({"weight": torch.ones(5)}, "weight must be"),
    ],
)
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_bad_arguments_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    if "main_grad_accumulation" in change:
        name = "fused"  # the references return the gradient of the head
    case = make_case()
    call: dict[str, Any] = {
        "hidden": case.hidden.requires_grad_(),
        "weight": case.weight.requires_grad_(),
        "targets": case.targets,
        "token_weights": case.token_weights,
        "vocab_size": 24,
    }
    with pytest.raises(ValueError, match=message):
        IMPLEMENTATIONS[name].topk(**(call | change))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    case = make_case()
    t = case.targets
    with pytest.raises(ValueError, match=f"temperature must be positive and finite, not {temperature}"):
        TopKTargets(t.ids, t.logprobs, t.tail_logmass, temperature)
    teacher = (case.teacher_hidden, case.teacher_weight)
    with pytest.raises(ValueError, match=f"temperature must be positive and finite, not {temperature}"):
        linear_full_divergence(
            case.hidden, case.weight, *teacher, case.token_weights, temperature=temperature, vocab_size=24
        )


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_the_teacher_is_a_constant(name: str) -> None:
    case = make_case()
    t = case.targets
    logprobs = t.logprobs.clone().requires_grad_()
    targets = TopKTargets(t.ids, logprobs, t.tail_logmass, t.temperature)
    hidden = case.hidden.clone().requires_grad_()
    out = IMPLEMENTATIONS[name].topk(hidden, case.weight, targets, case.token_weights, vocab_size=24)
    out.loss.backward()
    assert logprobs.grad is None and hidden.grad is not None


def test_targets_on_another_device_are_refused() -> None:
    case = make_case()
    t = case.targets
    elsewhere = TopKTargets(t.ids.to("meta"), t.logprobs.to("meta"), t.tail_logmass.to("meta"))
    with pytest.raises(ValueError, match="targets lie on meta, hidden on cpu"):
        linear_topk_divergence(case.hidden, case.weight, elsewhere, case.token_weights, vocab_size=24)


@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_a_boolean_mask_is_a_weight(name: str, mode: str) -> None:
    case = make_case()
    mask = torch.tensor([True, False, True, True, True, False, True])
    runs = [run_case(replace(case, token_weights=w), name, mode) for w in (mask, mask.double(), mask.long())]
    assert_equal_runs(runs[0], runs[1])
    assert_equal_runs(runs[2], runs[1])


@pytest.mark.parametrize(("bad", "where"), [(24, 3), (-2, 5), (2**31 - 1, 0)])
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_ids_out_of_range_are_refused(name: str, bad: int, where: int) -> None:
    case = make_case()
    ids, logprobs, tail = slots(case)
    ids[where, 1] = bad
    message = rf"targets.ids: id {bad} at token {where} is outside \[-1, 24\)"
    with pytest.raises(ValueError, match=message):
        run_case(with_targets(case, ids, logprobs, tail), name, "auto")
    labels = case.labels.clone()
    labels[where] = bad
    with pytest.raises(ValueError, match=rf"labels: id {bad} at token {where}"):
        run_case(replace(case, labels=labels), name, "auto", "full", ce_weight=0.5)


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    case = make_case()
    rest = (case.token_weights,)
    with pytest.raises(ValueError, match="the same vocabulary"):
        linear_full_divergence(
            case.hidden, case.weight, case.teacher_hidden, case.teacher_weight[:20], *rest, vocab_size=24
        )
    with pytest.raises(ValueError, match=r"teacher_hidden has shape \(6, 7\), expected \(7, 7\)"):
        linear_full_divergence(
            case.hidden, case.weight, case.teacher_hidden[:6], case.teacher_weight, *rest, vocab_size=24
        )
