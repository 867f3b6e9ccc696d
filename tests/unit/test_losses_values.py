"""Value and gradient of every implementation against the oracle, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.losses import IMPLEMENTATIONS, TAILS
from megatron_kd.targets import TopKTargets
from tests.unit.test_losses_oracle import (
    ALL_METHODS,
    COMBINATIONS,
    DIVERGENCES,
    METHODS,
    assert_agrees,
    make_case,
    oracle_run,
    run_case,
)

EXTRAS: list[dict[str, Any]] = [{}, {"ce_weight": 0.3}, {"ce_weight": 0.3, "logit_softcap": 2.0}]


@pytest.mark.parametrize(("divergence", "tail"), COMBINATIONS)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_topk_agrees_with_the_oracle(name: str, mode: str, divergence: str, tail: str) -> None:
    for temperature in (1.0, 1.7, 3.0, 0.5):
        case = make_case(temperature=temperature, masked=(2, 5))
        for extra in EXTRAS:
            kw: dict[str, Any] = {"divergence": divergence, "tail": tail, "beta": 0.3} | extra
            run = run_case(case, name, mode, upstream=-1.5, **kw)
            assert_agrees(run, oracle_run(case, upstream=-1.5, **kw))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_full_agrees_with_the_oracle(name: str, mode: str, divergence: str) -> None:
    for temperature in (1.0, 1.7, 3.0):
        case = make_case(temperature=temperature, masked=(0,))
        for extra in EXTRAS:
            kw: dict[str, Any] = {"divergence": divergence, "beta": 0.8} | extra
            run = run_case(case, name, mode, "full", upstream=0.25, **kw)
            assert_agrees(run, oracle_run(case, "full", upstream=0.25, **kw))


@pytest.mark.parametrize("temperature", [0.05, 0.2, 10.0, 50.0])
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_cross_entropy_beside_a_temperature_far_from_one(name: str, mode: str, kind: str, temperature: float) -> None:
    """Neither exponential is a power of the other that has underflown: at T < 1 exp(z), at T > 1 exp(T·z)."""
    case = make_case(temperature=temperature, masked=(2,), dtype=torch.float32)
    kw: dict[str, Any] = {"ce_weight": 0.999, "divergence": "tvd"}
    assert_agrees(run_case(case, name, mode, kind, **kw), oracle_run(case, kind, **kw), atol=1e-4)


@pytest.mark.parametrize("beta", [1e-8, 1e-4, 1 - 1e-4, 1 - 1e-8])
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_jsd_near_its_limits(mode: str, kind: str, beta: float) -> None:
    """Its gradient in float32, in proportion to itself: 1e-8 of that of the forward KL at the first β."""
    case = make_case(dtype=torch.float32)
    run = run_case(case, "fused", mode, kind, divergence="jsd", beta=beta)
    _, _, *expected = oracle_run(case, kind, divergence="jsd", beta=beta)
    for got, right in zip((run.hidden_gradient, run.weight_gradient), expected, strict=True):
        assert (got.double() - right).abs().max() < 1e-4 * right.abs().max()


def test_every_defined_combination_is_offered_and_no_other() -> None:
    assert sorted((d, t) for t, tail in TAILS.items() for d in tail.divergences) == sorted(COMBINATIONS)


@pytest.mark.parametrize(("name", "mode"), METHODS)
def test_without_t2_value_and_gradient_shrink_by_it(name: str, mode: str) -> None:
    case = make_case(temperature=3.0)
    assert_agrees(run_case(case, name, mode, scale_by_t2=False), oracle_run(case, scale_by_t2=False))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_finite_differences(name: str, mode: str, kind: str, divergence: str) -> None:
    """The derivative in a random direction, by central differences of the implementation's own value."""
    case = make_case(temperature=3.0)
    kw: dict[str, Any] = {"ce_weight": 0.2, "divergence": divergence}
    run = run_case(case, name, mode, kind, **kw)
    rng = torch.Generator().manual_seed(5)
    for _ in range(3):
        dh = torch.randn(case.hidden.shape, generator=rng, dtype=torch.float64)
        dw = torch.randn(case.weight.shape, generator=rng, dtype=torch.float64)
        step = 1e-5
        moved = [replace(case, hidden=case.hidden + s * dh, weight=case.weight + s * dw) for s in (step, -step)]
        up, down = (run_case(there, name, mode, kind, **kw) for there in moved)
        numeric = (up.output.loss - down.output.loss) / (2 * step)
        analytic = (run.hidden_gradient * dh).sum() + (run.weight_gradient * dw).sum()
        torch.testing.assert_close(analytic, numeric.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["topk", "full"])
@pytest.mark.parametrize(("name", "mode"), [m for m in METHODS if m[1] != "single_pass"])
def test_gradcheck(name: str, mode: str, kind: str, divergence: str) -> None:
    case = make_case(tokens=4, size=3, vocab=9, top_k=3, temperature=1.7)
    implementation = IMPLEMENTATIONS[name]

    def value(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kw: dict[str, Any] = {"vocab_size": 9, "mode": mode, "chunk_bytes": 200, "divergence": divergence}
        if kind == "topk":
            return implementation.topk(hidden, weight, case.targets, case.token_weights, **kw).loss
        teacher = (case.teacher_hidden, case.teacher_weight)
        return implementation.full(hidden, weight, *teacher, case.token_weights, temperature=1.7, **kw).loss

    assert torch.autograd.gradcheck(value, (case.hidden.requires_grad_(), case.weight.requires_grad_()))


@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_reverse_kl_where_the_teacher_gives_next_to_nothing(name: str, mode: str) -> None:
    """A cached log-probability of −200 or −∞ counts as −100; a full teacher's is taken as it is."""
    case = make_case()
    t = case.targets
    logprobs = t.logprobs.clone()
    logprobs[0, 3], logprobs[1, 2], logprobs[2, 3] = -200.0, -torch.inf, -100.0
    tail = t.tail_logmass.clone()
    tail[4] = -torch.inf
    floored = replace(case, targets=TopKTargets(t.ids, logprobs.clamp(min=-100), tail.clamp(min=-100), 1.0))
    run = run_case(replace(case, targets=TopKTargets(t.ids, logprobs, tail, 1.0)), name, mode, divergence="reverse_kl")
    assert_agrees(run, oracle_run(floored, divergence="reverse_kl"))
    case = replace(case, teacher_hidden=case.teacher_hidden * 30)
    lowest = (case.teacher_hidden @ case.teacher_weight[:24].t()).log_softmax(1).min()
    assert -700 < lowest < -200, "the oracle's probabilities must not underflow"
    run = run_case(case, name, mode, "full", divergence="reverse_kl")
    assert_agrees(run, oracle_run(case, "full", divergence="reverse_kl"))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_student_equal_to_teacher_has_no_loss_and_no_gradient(name: str, mode: str, divergence: str) -> None:
    """TVD's value is 0; its gradient is the sign of rounding errors, anything between −½q and ½q."""
    case = make_case(top_k=24, temperature=1.7)
    logp = torch.log_softmax(case.hidden @ case.weight[:24].t() / 1.7, dim=1)
    ids = torch.arange(24, dtype=torch.int32).expand(7, 24).contiguous()
    case = replace(
        case,
        teacher_hidden=case.hidden,
        teacher_weight=case.weight,
        targets=TopKTargets(ids, logp, torch.full((7,), -torch.inf), 1.7),
    )
    for kind in ("topk", "full"):
        run = run_case(case, name, mode, kind, divergence=divergence)
        gradients = () if divergence == "tvd" else (run.hidden_gradient, run.weight_gradient)
        for tensor in (run.output.loss_per_token, *gradients):
            assert tensor.abs().max() < 1e-13
        assert (run.output.statistics.top1_agreement == 1).all()


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 11])
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_numbers_of_tokens_around_the_chunk(name: str, mode: str, tokens: int) -> None:
    case = make_case(tokens=tokens)
    assert_agrees(run_case(case, name, mode), oracle_run(case))
    assert_agrees(run_case(case, name, mode, "full"), oracle_run(case, "full"))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 9),
    size=st.integers(1, 6),
    vocab=st.integers(1, 30),
    share=st.floats(0.01, 1.0),
    padding=st.integers(0, 5),
    rows=st.integers(1, 12),
    masked=st.sets(st.integers(0, 8), max_size=4),
    temperature=st.sampled_from([0.5, 1.0, 2.5]),
    method=st.sampled_from(ALL_METHODS),
    combination=st.sampled_from(COMBINATIONS),
)
def test_any_shape(
    tokens: int, size: int, vocab: int, share: float, padding: int, rows: int, masked: set[int], temperature: float,
    method: tuple[str, str], combination: tuple[str, str],
) -> None:  # fmt: skip
    case = make_case(
        tokens, size, vocab, max(1, int(share * vocab)), temperature, padding, seed=tokens + 10 * vocab,
        masked=tuple(m for m in masked if m < tokens),
    )  # fmt: skip
    divergence, tail = combination
    kw: dict[str, Any] = {"divergence": divergence, "tail": tail}
    assert_agrees(run_case(case, *method, rows=rows, **kw), oracle_run(case, **kw))
    kw = {"divergence": divergence}
    assert_agrees(run_case(case, *method, "full", rows=rows, **kw), oracle_run(case, "full", **kw))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), top_k=st.integers(1, 20), spread=st.floats(0.1, 12.0),
    method=st.sampled_from(ALL_METHODS), divergence=st.sampled_from(DIVERGENCES),
)  # fmt: skip
def test_bucket_is_bounded_from_below_with_rounded_targets(
    seed: int, top_k: int, spread: float, method: tuple[str, str], divergence: str
) -> None:
    """A divergence is not negative; rounding the targets to float16 costs at most the missing mass."""
    case = make_case(vocab=20, top_k=top_k, seed=seed)
    case = replace(case, hidden=case.hidden * spread)
    targets = case.targets
    rounded = TopKTargets(targets.ids, targets.logprobs.half(), targets.tail_logmass.float(), 1.0)
    run = run_case(replace(case, targets=rounded), *method, divergence=divergence)
    missing = (1 - rounded.logprobs.double().exp().sum(1) - rounded.tail_logmass.double().exp()).abs()
    assert (run.output.loss_per_token >= -missing - 1e-12).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("name", "mode"), ALL_METHODS)
def test_statistics(name: str, mode: str, divergence: str) -> None:
    case = make_case(tokens=9, temperature=1.7, masked=(4,))
    out = run_case(case, name, mode, ce_weight=0.3, divergence=divergence).output
    z = case.hidden @ case.weight[:24].t() / 1.7
    q = torch.softmax(z, dim=1)
    valid = case.token_weights != 0
    ids = case.targets.ids.long()
    stats = out.statistics
    on_set = q.gather(1, ids).sum(1)
    p_tail = case.targets.tail_logmass.exp()
    q_tail = 1 - on_set
    m_tail = 0.5 * (p_tail + q_tail)
    expected_tails = {
        "forward_kl": p_tail * (p_tail / q_tail).log(),
        "reverse_kl": q_tail * (q_tail / p_tail).log(),
        "jsd": 0.5 * (p_tail * (p_tail / m_tail).log() + q_tail * (q_tail / m_tail).log()),
        "tvd": 0.5 * (p_tail - q_tail).abs(),
    }
    expected_tail = 1.7**2 * expected_tails[divergence]
    torch.testing.assert_close(stats.teacher_mass, case.targets.logprobs.exp().sum(1) * valid)
    torch.testing.assert_close(stats.student_mass, on_set * valid)
    torch.testing.assert_close(stats.tail, expected_tail * valid)
    torch.testing.assert_close(stats.top1_agreement, (z.argmax(1) == ids[:, 0]).double() * valid)
    assert stats.kd_per_token is not None and stats.ce_per_token is not None
    torch.testing.assert_close(out.loss_per_token, 0.7 * stats.kd_per_token + 0.3 * stats.ce_per_token)
    assert stats.ce_per_token[1] == 0  # label −100
    torch.testing.assert_close(stats.kd_per_token, oracle_run(case, divergence=divergence)[1])
    for tensor in (out.loss_per_token, stats.tail, stats.kd_per_token):
        assert not tensor.requires_grad
    assert (stats.student_mass <= 1 + 1e-9).all()
    full = run_case(case, name, mode, "full", divergence=divergence).output.statistics
    u = case.teacher_hidden @ case.teacher_weight[:24].t()
    torch.testing.assert_close(full.top1_agreement, (z.argmax(1) == u.argmax(1)).double() * valid)
    torch.testing.assert_close(full.student_mass, valid.double())
    assert full.ce_per_token is None
