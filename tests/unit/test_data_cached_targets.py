"""Targets from the cache as training sees them, against a teacher's distribution computed here in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.cache.rank_table import build_rank_table
from megatron_kd.cache.store import create_cache, open_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.config import ModelConfig, load_model
from megatron_kd.data.batches import make_batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.packing import PackedRow
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from tests.assets import ROOT
from tests.unit.data_rows import (
    IDENTITY,
    TEMPERATURES,
    K,
    V,
    log_softmax,
    logits_of,
    make_cache,
    make_samples,
    packed_rows,
    row_of,
)

L = 9


@pytest.fixture(scope="module")
def teacher() -> ModelConfig:
    return load_model("tiny_llama", ROOT / "recipes")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return make_samples(tmp_path_factory.mktemp("samples") / "s")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, samples: SampleSet, teacher: ModelConfig) -> Path:
    path = tmp_path_factory.mktemp("cache") / "c"
    make_cache(path, samples, teacher)
    return path


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("top_k", [K, 5, 1])
def test_targets_are_the_teachers_at_any_k_and_temperature(
    cache: Path, samples: SampleSet, teacher: ModelConfig, temperature: float, top_k: int
) -> None:
    cached = CachedTargets(cache, samples, teacher=teacher, top_k=top_k, temperature=temperature)
    order = [3, 0]
    targets = cached.targets(order)
    assert targets.ids.shape == (L * 2, top_k)
    assert targets.temperature == temperature
    for b, sample in enumerate(order):
        expected = log_softmax(logits_of(sample) / temperature)
        ids = targets.ids.view(L, 2, top_k)[:, b].numpy()
        np.testing.assert_array_equal(ids, np.argsort(-expected, -1)[:, :top_k])
        logprobs = targets.logprobs.view(L, 2, top_k)[:, b].numpy()
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected, ids, -1), atol=5e-6)
        p = np.exp(expected)
        np.put_along_axis(p, ids, 0.0, -1)
        np.testing.assert_allclose(targets.tail_logmass.view(L, 2)[:, b].numpy(), np.log(p.sum(-1)), atol=5e-6)


def test_ids_that_the_student_lacks_are_folded_into_the_tail(
    cache: Path, samples: SampleSet, teacher: ModelConfig
) -> None:
    kept = V // 2
    cached = CachedTargets(cache, samples, teacher=teacher, top_k=K, temperature=1.0, student_vocab_size=kept)
    targets = cached.targets([1])
    logp = log_softmax(logits_of(1))
    ids = np.argsort(-logp, -1)[:, :K]
    assert (ids >= kept).any() and (ids < kept).any()
    np.testing.assert_array_equal(targets.ids.numpy(), np.where(ids < kept, ids, -1))
    p = np.exp(logp)
    inside = np.where(ids < kept, np.take_along_axis(p, ids, -1), 0.0).sum(-1)
    np.testing.assert_allclose(np.exp(targets.tail_logmass.numpy()), 1.0 - inside, atol=2e-3)  # float16 in the cache


def test_a_batch_is_sequence_first_and_predicts_the_next_token(
    cache: Path, samples: SampleSet, teacher: ModelConfig
) -> None:
    cached = CachedTargets(cache, samples, teacher=teacher, top_k=K, temperature=1.0)
    batch = make_batch(samples, [4, 1], cached)
    assert batch.tokens.shape == (2, L) and batch.tokens.dtype == torch.int64
    labels, weights = batch.labels.view(L, 2), batch.token_weights.view(L, 2)
    for b, sample in enumerate((4, 1)):
        tokens, mask = samples.tokens(sample), samples.loss_mask(sample)
        assert mask[-1] == 0  # the label of the last position is not in the row
        for n in range(L):
            assert weights[n, b] == mask[n]
            assert labels[n, b] == (tokens[n + 1] if mask[n] else -100)
    assert batch.num_tokens == int(samples.loss_mask(4).sum() + samples.loss_mask(1).sum())


def refused(cache: Path, samples: SampleSet, teacher: ModelConfig, pattern: str, **changes: Any) -> None:
    settings: dict[str, Any] = {"teacher": teacher, "top_k": K, "temperature": 1.0, **changes}
    with pytest.raises(CacheError, match=pattern):
        CachedTargets(cache, samples, **settings)


def test_what_does_not_belong_together_is_refused_before_a_row_is_read(
    cache: Path, samples: SampleSet, teacher: ModelConfig, tmp_path: Path
) -> None:
    refused(cache, samples, teacher, "keeps 12 tokens a position, teacher.top_k asks for 13", top_k=13)
    refused(cache, samples, teacher, r"loss.temperature is 3.0", temperature=3.0)
    other = teacher.model_copy(update={"num_layers": 7})
    smaller = teacher.model_copy(update={"vocab_size": V - 1})
    refused(cache, samples, smaller, "vocabulary of 1003, teacher.model 'tiny_llama' has 1002")
    refused(cache, samples, other, "num_layers 4, teacher.model 'tiny_llama' has 7")
    refused(cache, samples, teacher, "captured from other weights", weights_sha256="b" * 64)
    CachedTargets(cache, samples, teacher=teacher, top_k=K, temperature=1.0, weights_sha256="a" * 64)
    refused(cache, make_samples(tmp_path / "other", seed=1), teacher, "targets of other tokens")
    foreign = make_samples(tmp_path / "foreign", identity={**IDENTITY, "sha256": "xyz", "name": "other"})
    refused(cache, foreign, teacher, "another tokenizer")
    refused(tmp_path / "nothing", samples, teacher, "nothing")


def test_a_row_of_other_tokens_is_named_with_the_position(
    samples: SampleSet, teacher: ModelConfig, tmp_path: Path
) -> None:
    """The manifest says the right corpus, but one row is foreign: only the hash of the row can tell."""
    table = build_rank_table(samples.token_counts())
    make_cache(tmp_path / "good", samples, teacher)
    cache = create_cache(tmp_path / "bad", open_cache(tmp_path / "good").manifest, table)
    for shard in range(cache.manifest.shards):
        rows = [row_of(samples, i) for i in cache.manifest.shard_samples(shard)]
        if shard == 1:
            tokens = rows[0].tokens.copy()
            tokens[4] = (tokens[4] + 1) % V
            rows[0] = replace(rows[0], tokens=tokens)
        write_shard(cache, shard, rows)
    cached = CachedTargets(tmp_path / "bad", samples, teacher=teacher, top_k=K, temperature=1.0)
    cached.targets([0, 1, 3])
    cached.check_rows([0, 1, 3, 4])
    with pytest.raises(CacheError, match=r"sample 2 .*position 4"):
        cached.check_rows(range(5))
    with pytest.raises(CacheError, match=r"sample 2 .*position 4"):
        cached.targets([2])


def test_a_cache_with_a_hole_is_refused(samples: SampleSet, teacher: ModelConfig, tmp_path: Path) -> None:
    make_cache(tmp_path / "c", samples, teacher)
    (tmp_path / "c" / "commits" / "000001.json").unlink()
    refused(tmp_path / "c", samples, teacher, r"lacks samples 2.*3")


def test_ranks_share_the_look_at_the_files(samples: SampleSet, teacher: ModelConfig, tmp_path: Path) -> None:
    make_cache(tmp_path / "c", samples, teacher)
    shards = open_cache(tmp_path / "c").manifest.shards
    assert shards >= 3
    [values] = (tmp_path / "c" / "shards").glob("000001-*/rank/c.0.0")
    values.write_bytes(values.read_bytes()[:-1])
    for rank in range(shards):
        if rank == 1:
            refused(tmp_path / "c", samples, teacher, r"000001-.*rank/c\.0\.0.* bytes", share=(rank, shards))
        else:
            CachedTargets(tmp_path / "c", samples, teacher=teacher, top_k=K, temperature=1.0, share=(rank, shards))
    refused(tmp_path / "c", samples, teacher, r"000001-.*rank/c\.0\.0.* bytes")


def subset(samples: SampleSet, ids: list[int]) -> list[PackedRow]:
    return [PackedRow(samples.tokens(i), samples.loss_mask(i), samples.document_offsets(i)) for i in ids]


def test_samples_that_are_some_of_the_caches_in_another_order(
    cache: Path, samples: SampleSet, teacher: ModelConfig, tmp_path: Path
) -> None:
    """Other splits, another order, another loss mask: the row hash says where the targets are."""
    settings: dict[str, Any] = {"teacher": teacher, "top_k": K, "temperature": 1.0}
    train, heldout = subset(samples, [4, 1]), subset(samples, [2])
    masked = replace(train[0], loss_mask=np.zeros_like(train[0].loss_mask))
    few = make_samples(tmp_path / "few", splits={"train": [masked, train[1]], "heldout": heldout})
    joined, whole = CachedTargets(cache, few, **settings), CachedTargets(cache, samples, **settings)
    joined.check_rows(range(3))
    ours, theirs = make_batch(few, [2, 0, 1], joined), make_batch(samples, [2, 4, 1], whole)
    assert ours.targets is not None and theirs.targets is not None
    assert torch.equal(ours.tokens, theirs.tokens)
    for name in ("ids", "logprobs", "tail_logmass"):
        assert torch.equal(getattr(ours.targets, name), getattr(theirs.targets, name))
    assert ours.token_weights.view(L, 3)[:, 1].sum() == 0 != theirs.token_weights.view(L, 3)[:, 1].sum()


def test_samples_of_which_some_are_not_in_the_cache(
    cache: Path, samples: SampleSet, teacher: ModelConfig, tmp_path: Path
) -> None:
    rows = [*subset(samples, [3]), *packed_rows(L, 2, seed=5), *subset(samples, [0]), *packed_rows(L, 1, seed=6)]
    mixed = make_samples(tmp_path / "mixed", splits={"train": rows})
    refused(
        cache,
        mixed,
        teacher,
        r"other tokens .*: 3 of 5 rows are not among the 5 there \(samples 1–2, 4\): capture these",
    )


def test_a_damaged_row_is_named_by_the_sample_and_by_its_row(
    samples: SampleSet, teacher: ModelConfig, tmp_path: Path
) -> None:
    make_cache(tmp_path / "c", samples, teacher)
    few = make_samples(tmp_path / "few", splits={"train": subset(samples, [4, 1])})
    cached = CachedTargets(tmp_path / "c", few, teacher=teacher, top_k=K, temperature=1.0)
    (file,) = (tmp_path / "c").glob("shards/000002-*/rank/c.0.0")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    cached.targets([1])
    with pytest.raises(
        CacheError, match=r"targets of sample 0 of .*few cannot be read: sample 4 of .*c cannot be used"
    ):
        cached.targets([0])
