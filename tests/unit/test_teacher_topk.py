"""Top-K extraction against a float64 log-softmax over the whole vocabulary.

N tokens, D hidden, V vocabulary, K kept.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_kd.losses import peak_extra_bytes
from megatron_kd.teacher.topk import ExtractedTopK, chunk_rows, extract_top_k


def oracle(hidden: Tensor, head: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """ids [N, K] with ties to the lower id, float64 log-probs [N, K] and log of the sum of all other probabilities."""
    logprobs = torch.log_softmax(hidden.double() @ head.double().t() / temperature, dim=1)
    order = torch.sort(logprobs, dim=1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    return ids, logprobs.gather(1, ids), tail_of(logprobs, ids)


def tail_of(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Float64 log of the probability outside ids, summed over the outside: 1 − Σ would lose small tails."""
    return torch.logsumexp(logprobs.scatter(1, ids, -math.inf), dim=1)


def check(got: ExtractedTopK, hidden: Tensor, head: Tensor, temperature: float, atol: float = 2e-5) -> None:
    """All of an extraction against the oracle; ids may swap only where float32 cannot tell two logits apart."""
    targets = got.targets
    top_k = targets.top_k
    _, logprobs, _ = oracle(hidden, head, top_k, temperature)
    whole = torch.log_softmax(hidden.double() @ head.double().t() / temperature, dim=1)
    ids = targets.ids.long()
    assert targets.ids.dtype == torch.int32 and targets.logprobs.dtype == torch.float32
    assert ids.min() >= 0 and ids.max() < head.shape[0]
    assert all(len(set(row)) == top_k for row in ids.tolist())
    torch.testing.assert_close(targets.logprobs.double(), logprobs, rtol=0, atol=atol)
    torch.testing.assert_close(targets.logprobs.double(), whole.gather(1, ids), rtol=0, atol=atol)
    assert (targets.logprobs.diff(dim=1) <= 0).all()
    torch.testing.assert_close(targets.tail_logmass.double(), tail_of(whole, ids), rtol=1e-6, atol=atol)
    for other, (normalizer, tail) in got.log_normalizers.items():
        # The identity of the cache's rows: log p_T(v) = (T0/T)·log p_T0(v) − log_normalizer.
        at_other = torch.log_softmax(hidden.double() @ head.double().t() / other, dim=1)
        ratio = temperature / other
        rebuilt = targets.logprobs.double() * ratio - normalizer.double()[:, None]
        scale = max(1.0, ratio)
        torch.testing.assert_close(rebuilt, at_other.gather(1, ids), rtol=0, atol=2 * atol * scale)
        torch.testing.assert_close(tail.double(), tail_of(at_other, ids), rtol=1e-6, atol=2 * atol * scale)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 7),
    vocab=st.integers(2, 40),
    padding=st.integers(0, 9),
    kept=st.floats(0, 1),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    extra=st.sampled_from([(), (4.0,), (0.25, 3.0)]),
    scale=st.sampled_from([0.1, 2.0, 8.0]),
    budget=st.sampled_from([1, 400, 1 << 20]),
    seed=st.integers(0, 2**31),
)
def test_equals_a_float64_log_softmax(
    tokens: int,
    vocab: int,
    padding: int,
    kept: float,
    temperature: float,
    extra: tuple[float, ...],
    scale: float,
    budget: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=generator)
    # Padding rows would win every top-K if they were looked at.
    head = torch.cat((torch.randn(vocab, 6, generator=generator) * scale, torch.full((padding, 6), 100.0)))
    top_k = 1 + round(kept * (vocab - 1))
    got = extract_top_k(
        hidden,
        head,
        top_k,
        vocab_size=vocab,
        temperature=temperature,
        extra_temperatures=extra,
        chunk_bytes=budget,
    )
    assert got.targets.temperature == temperature and tuple(got.log_normalizers) == extra
    check(got, hidden, head[:vocab], temperature, atol=2e-5 * max(1.0, scale) / min(1.0, temperature))


def test_ties_go_to_the_lower_id() -> None:
    hidden = torch.ones(2, 1)
    head = torch.tensor([[1.0], [3.0], [2.0], [3.0], [2.0], [3.0], [2.0]])
    got = extract_top_k(hidden, head, 5, vocab_size=7)
    assert got.targets.ids.tolist() == [[1, 3, 5, 2, 4]] * 2


def test_ties_across_the_edge_of_the_kept_go_to_the_lower_id() -> None:
    """torch.topk promises no order among equals: many equal logits, few of them kept."""
    hidden, head = torch.ones(3, 1), torch.ones(500, 1)
    got = extract_top_k(hidden, head, 7, vocab_size=500)
    assert got.targets.ids.tolist() == [list(range(7))] * 3


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.integers(1, 3000),
    kept=st.integers(1, 12),
    levels=st.integers(0, 40),
    extra=st.sampled_from([(), (2.0,)]),
    seed=st.integers(0, 2**31),
)
def test_wide_rows_full_of_ties(vocab: int, kept: int, levels: int, extra: tuple[float, ...], seed: int) -> None:
    """Whole numbers, which float32 multiplies exactly: ids must equal a stable sort's, whatever is looked at first."""
    hidden, head = whole_numbers(5, vocab, levels, seed)
    top_k = min(kept, vocab)
    got = extract_top_k(hidden, head, top_k, vocab_size=vocab, extra_temperatures=extra)
    assert torch.equal(got.targets.ids.long(), oracle(hidden, head, top_k, 1.0)[0])
    check(got, hidden, head, 1.0)


def whole_numbers(tokens: int, vocab: int, levels: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hidden states [N, 3] and a head [V, 3] whose products are exact, with at most 6·levels + 1 different logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-1, 2, (tokens, 3), generator=generator)
    return hidden.float(), torch.randint(-levels, levels + 1, (vocab, 3), generator=generator).float()


def test_a_soft_cap_comes_before_the_temperature() -> None:
    """On exact logits of a few sizes, most of them saturated, against the definition in float64."""
    hidden, head = whole_numbers(40, 2500, 30, 3)
    cap, temperature = 7.5, 2.0
    got = extract_top_k(
        hidden, head, 6, vocab_size=2500, temperature=temperature, extra_temperatures=(1.0,), logit_softcap=cap
    )
    logits = cap * torch.tanh(hidden.double() @ head.double().t() / cap)
    # The identity as a head, so that the hidden states are the logits: float32 cannot tell the saturated ones apart.
    check(got, logits, torch.eye(2500, dtype=torch.float64), temperature)
    bare = extract_top_k(hidden, head, 6, vocab_size=2500, temperature=temperature)
    assert (bare.targets.logprobs - got.targets.logprobs).abs().max() > 1


def test_one_group_of_columns_may_hold_all_that_is_kept() -> None:
    """And the largest logit outside lies in it, too, or in any other."""
    vocab, top_k = 64 * 40, 9
    for outside in (30, 64 * 39 + 63, 0):
        logits = torch.linspace(-1, 0, vocab)
        logits[10 : 10 + top_k] = 5.0 + torch.arange(top_k)
        logits[outside] = 4.0
        got = extract_top_k(torch.ones(1, 1), logits[:, None], top_k, vocab_size=vocab)
        assert got.targets.ids.tolist() == [list(range(10 + top_k - 1, 9, -1))]
        check(got, torch.ones(1, 1), logits[:, None], 1.0)


@pytest.mark.parametrize("vocab", [50, 4000])
def test_a_logit_that_is_no_number_shows_in_its_row_alone(vocab: int) -> None:
    for sign in (1.0, -1.0):
        hidden, head = torch.randn(3, 4), torch.randn(vocab, 4)
        hidden[1] = math.copysign(math.nan, sign)
        targets = extract_top_k(hidden, head, 5, vocab_size=vocab).targets
        assert targets.logprobs[1].isnan().all() and targets.tail_logmass[1].isnan()
        assert torch.isfinite(targets.logprobs[[0, 2]]).all() and torch.isfinite(targets.tail_logmass[[0, 2]]).all()


@pytest.mark.parametrize("top_k", [1, 5])
def test_the_tail_of_everything_is_nothing(top_k: int) -> None:
    head = torch.randn(top_k, 4)
    got = extract_top_k(torch.randn(3, 4), head, top_k, vocab_size=top_k, extra_temperatures=(2.0,))
    assert (got.targets.tail_logmass == -math.inf).all()
    assert (got.log_normalizers[2.0][1] == -math.inf).all()
    assert torch.isfinite(got.log_normalizers[2.0][0]).all()


def test_a_tail_too_small_for_one_minus_the_sum_is_kept() -> None:
    head = torch.tensor([[40.0], [39.0], [0.0], [-1.0]])
    got = extract_top_k(torch.ones(1, 1), head, 2, vocab_size=4)
    check(got, torch.ones(1, 1), head, 1.0)
    assert -41 < float(got.targets.tail_logmass) < -39
    head *= 10  # not even a float32 relative to the largest logit
    check(extract_top_k(torch.ones(1, 1), head, 2, vocab_size=4), torch.ones(1, 1), head, 1.0, atol=5e-5)


def test_bfloat16_inputs_are_projected_in_float32() -> None:
    hidden, head = torch.randn(5, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    check(extract_top_k(hidden, head, 20, vocab_size=300, extra_temperatures=(2.0,)), hidden, head, 1.0, atol=5e-5)


def test_every_budget_gives_the_same_answer() -> None:
    hidden, head = torch.randn(33, 8), torch.randn(120, 8)
    whole = extract_top_k(hidden, head, 10, vocab_size=120)
    for budget in (1, 4 * 120, 7 * 4 * 120, 1 << 30):
        part = extract_top_k(hidden, head, 10, vocab_size=120, chunk_bytes=budget)
        assert torch.equal(part.targets.ids, whole.targets.ids)
        torch.testing.assert_close(part.targets.logprobs, whole.targets.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(part.targets.tail_logmass, whole.targets.tail_logmass, rtol=0, atol=1e-5)


def test_no_tokens_give_empty_targets() -> None:
    got = extract_top_k(torch.zeros(0, 4), torch.randn(9, 4), 3, vocab_size=9, extra_temperatures=(2.0,))
    assert got.targets.ids.shape == (0, 3) and got.log_normalizers[2.0][0].shape == (0,)


def test_more_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k 10 exceeds the vocabulary of 9"):
        extract_top_k(torch.zeros(1, 4), torch.zeros(16, 4), 10, vocab_size=9)


@pytest.mark.parametrize("extra", [(), (2.0, 4.0)])
def test_memory_stays_near_the_budget(extra: tuple[float, ...]) -> None:
    tokens, vocab, top_k = 512, 4096, 16
    hidden, head = torch.randn(tokens, 32), torch.randn(vocab, 32)
    everything, budget = 4 * tokens * vocab, 4 * vocab * 16
    kept = (4 + 4 + 8) * tokens * top_k
    seen = peak_extra_bytes(
        lambda: extract_top_k(hidden, head, top_k, vocab_size=vocab, chunk_bytes=budget, extra_temperatures=extra)
    )
    # One buffer of logits, another while a temperature looks at it.
    assert seen < 3 * budget + 2 * kept + 65536
    assert seen < everything / 8


@given(st.integers(1, 10**6), st.integers(1, 300_000), st.integers(1, 1 << 32))
def test_chunks_fit_their_budget(tokens: int, local_vocab: int, budget: int) -> None:
    rows = chunk_rows(tokens, local_vocab, budget)
    assert 1 <= rows <= tokens
    assert rows == 1 or rows * local_vocab * 4 <= budget
