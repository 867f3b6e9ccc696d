"""Targets from the cache as training sees them, against a teacher's distribution computed here in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_kd.cache.manifest import CacheManifest
from megatron_kd.cache.rank_table import build_rank_table, rank_table_hash
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import create_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.config import ModelConfig, load_model
from megatron_kd.data.batches import make_batch
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.packing import concatenate
from megatron_kd.data.sample_writer import write_samples
from megatron_kd.data.samples import SampleSet
from megatron_kd.errors import CacheError
from tests.assets import ROOT

V, K, L, ROWS = 1003, 12, 9, 5
IDENTITY = {"name": "toy", "sha256": "abc", "segmentation_sha256": "def", "vocab_size": V}
TEMPERATURES = (1.0, 2.5)


def make_samples(folder: Path, seed: int = 0, identity: dict[str, Any] = IDENTITY) -> SampleSet:
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, V, n, dtype=np.int32) for n in (13, 7, 20, 30)]
    rows = list(concatenate(documents, L, 0))[:ROWS]
    return write_samples(
        folder,
        {"train": iter(rows)},
        seq_length=L,
        packing="concatenate",
        tokenizer_identity=identity,
        corpus_identity={"seed": seed},
        selection={},
    )


def logits_of(sample: int) -> np.ndarray:
    return np.random.default_rng([7, sample]).normal(0, 2, (L, V))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_cache(folder: Path, samples: SampleSet, teacher: ModelConfig, **changes: Any) -> None:
    table = build_rank_table(samples.token_counts())
    manifest = CacheManifest(
        rows=len(samples),
        rows_per_shard=2,
        top_k=K,
        vocab_size=V,
        rank_table_hash=rank_table_hash(table),
        value_dtype="float32",
        temperatures=TEMPERATURES,
        teacher={
            "name": teacher.name,
            "architecture": teacher.model_dump(mode="json"),
            "weights_sha256": "a" * 64,
        },
        tokenizer=samples.tokenizer_identity,
        corpus={"content": samples.manifest["content"]},
    )
    cache = create_cache(folder, replace(manifest, **changes), table)
    for shard in range(manifest.shards):
        write_shard(cache, shard, [row_of(samples, i) for i in manifest.shard_samples(shard)])


def row_of(samples: SampleSet, i: int) -> Row:
    logits = logits_of(i)
    at = {t: log_softmax(logits / t) for t in TEMPERATURES}
    ids = np.argsort(-at[1.0], -1)[:, :K]

    def tail(logp: np.ndarray) -> np.ndarray:
        p = np.exp(logp)
        np.put_along_axis(p, ids, 0.0, -1)
        return np.log(p.sum(-1)).astype(np.float32)

    normalizer = np.log(np.exp(at[1.0] / 2.5).sum(-1))
    return Row(
        sample_id=i,
        tokens=samples.tokens(i),
        loss_mask=samples.loss_mask(i),
        document_offsets=samples.document_offsets(i),
        ids=ids.astype(np.int32),
        logprobs=np.take_along_axis(at[1.0], ids, -1).astype(np.float32),
        tail_logmass=tail(at[1.0]),
        log_normalizers=normalizer[None].astype(np.float32),
        tail_logmass_extra=tail(at[2.5])[None],
    )


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
    from megatron_kd.cache.store import open_cache

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
    with pytest.raises(CacheError, match=r"sample 2 .*position 4"):
        cached.targets([2])


def test_a_cache_with_a_hole_is_refused(samples: SampleSet, teacher: ModelConfig, tmp_path: Path) -> None:
    make_cache(tmp_path / "c", samples, teacher)
    (tmp_path / "c" / "commits" / "000001.json").unlink()
    refused(tmp_path / "c", samples, teacher, r"lacks samples 2.*3")
