"""The sum of a row's probabilities: whatever rounding does is accepted at every temperature, damage is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.cache.mass import check_mass
from megatron_kd.cache.row import Row
from megatron_kd.cache.values import VALUE_DTYPES, from_patterns, to_patterns
from megatron_kd.errors import CacheError
from megatron_kd.teacher.topk import extract_top_k


def scored(logits: torch.Tensor, top_k: int, temperatures: tuple[float, ...]) -> Row:
    """A row [L] of a teacher with these logits [L, V], as a capture takes it."""
    length, vocab = logits.shape
    found = extract_top_k(
        logits.float(),
        torch.eye(vocab),
        top_k,
        vocab_size=vocab,
        temperature=temperatures[0],
        extra_temperatures=temperatures[1:],
    )
    extras = [[part.numpy() for part in pair] for pair in found.log_normalizers.values()]
    return Row(
        sample_id=0,
        tokens=np.zeros(length, "i4"),
        loss_mask=np.ones(length, "u1"),
        document_offsets=np.zeros(1, "i4"),
        ids=found.targets.ids.numpy(),
        logprobs=np.minimum(found.targets.logprobs.numpy(), 0),
        tail_logmass=np.minimum(found.targets.tail_logmass.numpy(), 0),
        log_normalizers=np.array([extra[0] for extra in extras], "f4").reshape(-1, length),
        tail_logmass_extra=np.minimum(np.array([extra[1] for extra in extras], "f4").reshape(-1, length), 0),
    )


def stored(row: Row, value_dtype: str) -> Row:
    """As it comes back from the cache."""
    return replace(row, logprobs=from_patterns(to_patterns(row.logprobs, value_dtype), value_dtype))


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([2, 7, 90, 1003]),
    keep=st.floats(0.0, 1.0),
    spread=st.floats(-3.0, 2.0),
    offset=st.sampled_from([0.0, 30.0, -200.0]),
    temperatures=st.lists(st.floats(-2.0, 2.0).map(lambda x: float(10**x)), min_size=2, max_size=3, unique=True),
)
def test_a_correct_row_is_never_refused(
    value_dtype: str, seed: int, vocab: int, keep: float, spread: float, offset: float, temperatures: list[float]
) -> None:
    """Teachers from flat to certain, at ratios of temperatures from 1e-4 to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, vocab, generator=generator, dtype=torch.float64) * 10**spread + offset
    row = scored(logits, max(1, round(keep * vocab)), tuple(temperatures))
    for each in (row, stored(row, value_dtype)):
        check_mass(each, temperatures, value_dtype)


@pytest.mark.parametrize(
    ("value_dtype", "temperatures"),
    [
        ("bfloat16", (1.0, 0.05)),
        ("float32", (100.0, 0.01)),
        ("float16", (1.0, 0.01)),
        ("float16", (0.01, 100.0)),
        ("bfloat16", (100.0, 0.01)),
    ],
)
@pytest.mark.parametrize("top_k", [20, 1003])
def test_extreme_ratios(value_dtype: str, temperatures: tuple[float, ...], top_k: int) -> None:
    logits = torch.randn(400, 1003, generator=torch.Generator().manual_seed(3)) * 3
    row = scored(logits, top_k, temperatures)
    for each in (row, stored(row, value_dtype)):
        check_mass(each, temperatures, value_dtype)


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    position=st.integers(0, 11),
    temperature=st.floats(0.5, 4.0),
    ratio=st.sampled_from([1.0, 0.5, 2.0]),
)
def test_damage_is_refused_near_the_first_temperature(
    value_dtype: str, seed: int, position: int, temperature: float, ratio: float
) -> None:
    """A tail, a log-probability or a normalizer that is off by a fifth of the whole mass."""
    logits = torch.randn(12, 90, generator=torch.Generator().manual_seed(seed)) * 2
    temperatures = (temperature,) if ratio == 1.0 else (temperature, temperature / ratio)
    row = stored(scored(logits, 20, temperatures), value_dtype)
    tails = row.tail_logmass.copy()
    tails[position] = np.log(abs(np.exp(tails[position]) - 0.2) if tails[position] > np.log(0.3) else 0.5)
    broken = [replace(row, tail_logmass=tails)]
    if ratio != 1.0:
        normalizers = row.log_normalizers.copy()
        normalizers[0, position] += 0.4 if seed % 2 else -0.4
        extra = np.log(np.maximum(0.0, np.exp(row.tail_logmass_extra) - 0.25 * (np.exp(row.tail_logmass_extra) > 0.6)))
        broken.append(replace(row, log_normalizers=normalizers, tail_logmass_extra=np.minimum(extra, -0.6)))
    for each in broken:
        with pytest.raises(CacheError, match=r"add up to [\d.]+, rounding explains [\d.]+ to [\d.]+"):
            check_mass(each, temperatures, value_dtype)


def test_the_message_tells_the_sum_from_its_bound() -> None:
    """Four digits were not enough to see why."""
    row = scored(torch.zeros(1, 4), 4, (1.0,))
    row = replace(row, logprobs=row.logprobs + np.float32(1e-3))
    with pytest.raises(CacheError, match=r"add up to 1\.0010005, rounding explains 0\.9997998\d to 1\.0002002"):
        check_mass(row, (1.0,), "float32")
